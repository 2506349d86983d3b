"""FedAS: bridging inconsistency in personalized federated learning.

Yang, Huang, Ye. CVPR 2024.
https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html

FedPer, in which the client first moves the received body b towards what its head has learned on,
and clients that have learned little weigh less. With z(b) the features of a body, by class c:

    P_c = mean of z(b_i) over the client's examples of c      b_i: its body after its last training
    b <- b - eta_a grad of sum_c mean over the batch's examples of c of ||z(b) - P_c||^2 / d
    (b_i, h_i): E epochs of the local optimizer from (b, h_i), on both together
    t_i = sum over mini-batches of ||grad of CE(b_i, h_i)||^2     the Fisher information's trace
    b <- b + eta_g sum_i (t_i / sum_j t_j) (b_i - b)

The second line is one pass over the client's examples. It and the gradients of t_i are taken in
eval mode, without augmentation. In a client's first round b_i is b, so that the pass only draws
each class together. eta_a = 0 is FedPer with the weights t_i. A large t_i says that the client's
model still changes much.

These are the equations of the code: the paper's text was not at hand. PFLlib's takes mini-batches
of 16 for the second line. The authors' code moves the server's own b there, so that every client
starts where the last one has moved it to; PFLlib's copies it, as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import (
    ClientSide,
    LocalContext,
    LocalSummary,
    Payloads,
    Reads,
    RefusedReplyError,
    Reply,
    ServerSide,
    Shapes,
    Tensors,
    Weighting,
)
from fedhet.strategies.fedper import FedPer
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.exact_sum import ExactSum

TRACE = "fisher_trace"  # t_i (1,)
LAST = "fedas_last"  # b_i, in the client state


class FedASClient(ClientSide):
    """Aligns the received body with the client's last one; ``lr`` is eta_a."""

    by_class = True
    sends = frozenset({TRACE})
    moves_start = True
    own_state = frozenset({LAST})

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def begin(self, context: LocalContext) -> None:
        """Move the body."""
        if self.lr == 0.0 or not context.shared:
            return
        context.model.eval()
        self._align(context, _prototypes(context, context.state.get(LAST, {})))
        context.model.train()
        context.start_here()

    @torch.enable_grad()
    def _align(self, context: LocalContext, prototypes: Tensor) -> None:
        body = [context.params[name] for name in context.anchor]
        for inputs, labels in context.data.batches(
            context.batch_size, generator=context.generator, train=False
        ):
            features, _ = context.model(inputs)
            distances = (features - prototypes[labels]).square().mean(1)
            members = F.one_hot(labels).to(distances.dtype)
            loss = (distances @ members / members.sum(0).clamp_min(1)).sum()
            slopes = torch.autograd.grad(loss, body, materialize_grads=True)
            with torch.no_grad():
                for value, slope in zip(body, slopes, strict=True):
                    value -= self.lr * slope

    @torch.enable_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep b_i and send t_i."""
        model = context.model.eval()
        tensors = model.state_dict()
        context.state[LAST] = {name: tensors[name].clone() for name in context.shared}
        params = [value for value in context.params.values() if value.requires_grad]
        trace = params[0].new_zeros(1)
        for inputs, labels in context.data.batches(context.batch_size, generator=None, train=False):
            loss = F.cross_entropy(model(inputs)[1], labels)
            for slope in torch.autograd.grad(loss, params, materialize_grads=True):
                trace += slope.square().sum()
        return {TRACE: {TRACE: trace}}

    def own_model(self, context: LocalContext) -> Tensors:
        """Return b_i."""
        return context.state[LAST]


@torch.no_grad()
def _prototypes(context: LocalContext, body: Tensors) -> Tensor:
    """Return a body's mean features by class (C, d), zeros for a class without examples."""
    sums = counts = torch.zeros(())
    for inputs, labels in context.data.batches(context.batch_size, generator=None, train=False):
        features, _ = functional_call(context.model, dict(body), (inputs,))
        members = F.one_hot(labels, context.num_classes).to(features.dtype)
        sums, counts = sums + members.T @ features, counts + members.sum(0)
    return sums / counts.clamp_min(1)[:, None]


class FedASServer(ServerSide):
    """Weighs the clients by their t_i; all the same if none is above 0. The aggregator, too."""

    needs = frozenset({TRACE})
    reads = Reads.REPLIES
    weighs: ClassVar[Weighting] = "examples"

    def expected(self) -> Shapes:
        """One number."""
        return {TRACE: {TRACE: (1,)}}

    def check(self, reply: Reply) -> None:
        """Refuse a negative trace."""
        if (trace := reply.payloads[TRACE][TRACE].item()) < 0:
            raise RefusedReplyError(f"its {TRACE} is {trace}: it must be at least 0")

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return Delta."""
        weights = [float(reply.payloads[TRACE][TRACE]) for reply in replies]
        weights = weights if sum(weights) > 0 else [1.0] * len(replies)
        total = ExactSum()
        for reply, weight in zip(replies, weights, strict=True):
            total.add(reply.update, weight / sum(weights))
        return total.over(1.0)


class FedAS(FedPer):
    """FedAS (Yang et al. 2024): personalised; FedPer, and a client first aligns the shared body
    with its own last one; clients weigh by the Fisher information of their models.
    """

    replaces = frozenset({"personal", "aggregator"})
    requires = MappingProxyType({"strategy.aggregator": None})

    lr: NotNegative = 0.01
    """eta_a, step size of the alignment; 0 does without"""

    def parts(self) -> Parts:
        """Align at the clients and weigh at the server."""
        server = FedASServer()
        return Parts(
            client_sides={"fedas": FedASClient(self.lr)},
            server_sides={"fedas": server},
            aggregator=server,
        )
