"""Fisher merging: merging models with Fisher-weighted averaging.

Matena, Raffel. NeurIPS 2022. https://arxiv.org/abs/2111.09832

Each number of the merged model is the mean of the clients' numbers, weighted by how much the
client's predictions depend on it (eq. 4), with the diagonal Fisher information (eq. 3):

    F_i   = mean over examples of E_{c ~ p(c | z; y_i)} (grad log p(c | z; y_i))^2
    x     = sum_i n_i F_i y_i / sum_i n_i F_i

y_i is client i's model after training, in eval mode; the expectation is exact: a gradient for each
example and class. F_i is at least 1e-6, as in the released code, so a number that nobody's
predictions depend on is the mean. Equal F_i give FedAvg's mean. The paper weighs the models by
hyperparameters that sum to 1, here n_i / n; the released code can also scale each F_i to norm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from fedhet.common.kinds import Count
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
)
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts

FISHER = "fisher"
_LEAST = 1e-6


class FisherClient(ClientSide):
    """Sends the diagonal Fisher information of its model, by parameter."""

    by_class = True
    sends = frozenset({FISHER})

    def __init__(self, examples: int) -> None:
        self.examples = examples

    @torch.enable_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Return F_i, of ``examples`` of the client's examples."""
        context.model.eval()
        params = {name: context.params[name] for name in context.anchor}
        fisher = {name: torch.zeros_like(value) for name, value in params.items()}
        chosen = context.data.batches(1, generator=context.generator, train=False)
        count = 0
        for inputs, _ in islice(chosen, self.examples):
            count += 1
            for log_p in log_softmax(context.model(inputs)[1][0], 0):
                grads = torch.autograd.grad(
                    log_p, list(params.values()), retain_graph=True, materialize_grads=True
                )
                for total, grad in zip(fisher.values(), grads, strict=True):
                    total.add_(log_p.detach().exp() * grad**2)
        return {FISHER: {name: total / count for name, total in fisher.items()}}


class FisherServer(ServerSide):
    """Refuses negative Fisher information."""

    needs = frozenset({FISHER})

    def init(self, params: Tensors) -> None:
        """Note the shapes."""
        self.shapes = {name: tuple(value.shape) for name, value in params.items()}

    def expected(self) -> Shapes:
        """Return the parameters' shapes."""
        return {FISHER: self.shapes}

    def check(self, reply: Reply) -> None:
        """Refuse negative numbers."""
        for name, value in reply.payloads[FISHER].items():
            if (value < 0).any():
                raise RefusedReplyError(f"its Fisher information of {name} is negative")


class FisherMean:
    """sum_i n_i F_i u_i / sum_i n_i F_i, number by number, in float64."""

    reads = Reads.MODELS

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to the merged model."""
        return {name: self._mean(name, replies).to(x.dtype) for name, x in params.items()}

    def _mean(self, name: str, replies: Sequence[Reply]) -> Tensor:
        weights = [
            reply.num_examples * reply.payloads[FISHER][name].double().clamp_min(_LEAST)
            for reply in replies
        ]
        weighted = [w * reply.update[name] for w, reply in zip(weights, replies, strict=True)]
        return torch.stack(weighted).sum(0) / torch.stack(weights).sum(0)


class FisherMerging(Method):
    """Fisher merging (Matena and Raffel 2022): one round; the mean of the clients' models, each
    number weighted by how much the client's predictions depend on it.
    """

    name = "fisher_merging"
    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.aggregator": None})

    examples: Count = 256
    """of each client, drawn for its Fisher information; each costs a gradient for every class"""

    def parts(self) -> Parts:
        """Merge the models of clients that send their Fisher information."""
        return Parts(
            client_sides={self.name: FisherClient(self.examples)},
            server_sides={self.name: FisherServer()},
            aggregator=FisherMean(),
        )
