"""DBE: eliminating domain bias for federated learning in representation space.

Zhang, Hua, Cao, Wang, Song, Xue, Ma, Guan. NeurIPS 2023. https://arxiv.org/abs/2311.14975

FedAvg, in which what is the client's own in the features z (d) moves to a vector m_i that stays at
the client, and the features keep near a mean g that all clients share. Round 1 is FedAvg's; with
the features of the mini-batches, every client also sends their moving mean, which begins each round
at 0:

    r <- (1 - mu) r + mu mean over the batch of z
    g = sum_i (n_i / sum_j n_j) r_i             over the clients of round 1, after their last step

From round 2 on the client trains, with the classifier h:

    L(y, m_i) = CE(h(z + m_i)) + kappa mean over d of (r - g)^2 / 2
    m_i <- m_i - eta_l dL/dm_i                  from 0, with every step of y_i, plain SGD

g is of the clients of one round, so fedhet rejects rounds that do not wait (FedBuff, FedAsync).
r is a constant but for its last batch. h is linear, so m_i adds W m_i to the logits, and the
client's own model, which is evaluated (``evaluation.model=clients``), is y_i with that in its bias:
the recipe gives the classifier one (``task.head_bias=true``).
With mu = 0 or kappa = 0 the features are free, and m_i still learns.

The defaults are those of PFLlib, where the authors' code is, but for kappa, which is 0 there and
tuned by task. It throws round 1's models away and begins again at x; here they are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import NotNegative, Share
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    ReplySum,
    ServerSide,
    Shapes,
    Step,
    Tensors,
)
from fedhet.strategies.components.tensor_selection import linear_classifier
from fedhet.strategies.method import OWN_MODELS, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_means import COUNTS, SUMS

CONSENSUS, MEANS = "feature_consensus", "feature_means"  # g down; r n_i and n_i up
OFFSET = "dbe_offset"  # m_i, in the client state
_MEAN = "mean"


class DBEClient(ClientSide):
    """Learns an offset of the features and keeps them near the mean of all clients."""

    needs, sends = frozenset({CONSENSUS}), frozenset({MEANS})
    per_example, counts = frozenset({MEANS}), frozenset({COUNTS})
    own_state = frozenset({OFFSET})
    plain_steps = "the offsets of the features"

    def __init__(self, kappa: float, mu: float) -> None:
        self.kappa, self.mu = kappa, mu

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a classifier that is not linear, or has no bias to take up the offset."""
        if linear_classifier(model, "DBE adds an offset to the inputs of").bias is None:
            raise ConfigError(
                "strategy=dbe needs a classifier with a bias: set task.head_bias=true"
            )

    def begin(self, context: LocalContext) -> None:
        """Load m_i and g; forget r."""
        size = context.params["head.weight"].new_zeros(context.params["head.weight"].shape[1])
        self.offset = context.state.get(OFFSET, {OFFSET: size})[OFFSET]
        self.consensus = context.received[CONSENSUS].get(_MEAN)  # None in round 1
        self.mean = size

    def penalty(self, step: Step) -> Tensor | None:
        """Move m_i; return the term that turns the loss into that of the offset features."""
        if step.context.first_pass:  # all passes of a step have the m_i and the r from before it
            self.before = self.offset, self.mean
        offset, mean = self.before
        mean = (1 - self.mu) * mean + self.mu * step.features.mean(0)
        if step.context.first_pass:
            self.mean = mean.detach()
        if self.consensus is None:
            return None
        loss, weight = step.context.loss, step.params["head.weight"]
        plain = loss(step.logits, step.labels)
        shifted = loss(step.logits + F.linear(offset, weight), step.labels)
        if step.context.first_pass:
            self.offset = offset - step.context.lr * self._slope(step)
        return shifted - plain + self.kappa / 2 * (mean - self.consensus).square().mean()

    @torch.enable_grad()
    def _slope(self, step: Step) -> Tensor:
        """Return dL/dm_i (d)."""
        offset = self.offset.clone().requires_grad_()
        logits = step.logits.detach() + F.linear(offset, step.params["head.weight"].detach())
        (slope,) = torch.autograd.grad(step.context.loss(logits, step.labels), [offset])
        return slope

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep m_i; in round 1 send r n_i (d) and n_i (1,)."""
        context.state[OFFSET] = {OFFSET: self.offset}
        if self.consensus is not None:
            return {MEANS: {}}
        count = self.mean.new_full((1,), summary.num_examples)
        return {MEANS: {SUMS: self.mean * count, COUNTS: count}}

    def own_model(self, context: LocalContext) -> Tensors:
        """Return the classifier's bias with W m_i."""
        weight, bias = (context.params[f"head.{name}"].detach() for name in ("weight", "bias"))
        return {"head.bias": bias + F.linear(context.state[OFFSET][OFFSET], weight)}


class DBEServer(ServerSide):
    """Keeps g, from round 1."""

    needs, sends = frozenset({MEANS}), frozenset({CONSENSUS})
    kept = ("consensus",)

    def init(self, params: Tensors) -> None:
        """Start without g."""
        self.consensus: dict[str, Tensor] = {}
        self.size = params["head.weight"].shape[1] if "head.weight" in params else None

    def broadcast(self, client_id: int) -> Payloads:
        """Send g (d); nothing in round 1."""
        return {CONSENSUS: self.consensus}

    def expected(self) -> Shapes:
        """Return the shapes of round 1; nothing is sent later."""
        return {MEANS: {} if self.consensus else {SUMS: (self.size,), COUNTS: (1,)}}

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """Take the mean over all examples of round 1."""
        if not self.consensus:
            sums, counts = (total.payloads[MEANS][name] for name in (SUMS, COUNTS))
            self.consensus = {_MEAN: sums / counts}


class DBE(Method):
    """DBE (Zhang et al. 2023): personalised; FedAvg, and every client learns an offset of its
    features, whose mean keeps near that of all clients.
    """

    replaces = frozenset({"loss"})
    settings = MappingProxyType({**OWN_MODELS, "task.head_bias": True})
    requires = MappingProxyType({"strategy.asynchronous": None})  # g is of one round's clients

    kappa: NotNegative = 1.0
    """how strongly the mean features are pulled to those of all clients; PFLlib: 0"""
    mu: Share = 0.1
    """weight of the newest mini-batch in a client's mean features"""

    def parts(self) -> Parts:
        """Add both halves."""
        return Parts(
            client_sides={"dbe": DBEClient(self.kappa, self.mu)},
            server_sides={"dbe": DBEServer()},
        )
