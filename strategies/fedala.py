"""FedALA: adaptive local aggregation for personalized federated learning.

Zhang, Hua, Wang, Song, Xue, Ma, Guan. AAAI 2023. https://arxiv.org/abs/2212.01197

FedAvg's server and training, with another start. In the selected tensors, the last ones, a client
mixes its last model with the global one, element by element, so that its loss falls (Algorithm 1):

    w_start = w_local + (w_global - w_local) A                      w_local: after its last training
    A <- clip(A - eta dL(w_start)/dw (w_global - w_local), 0, 1)               once a mini-batch

A starts at 1 and stays from round to round. The other tensors, and buffers, are the global ones.
A client's first round has no w_local and is FedAvg's, as is every round with eta = 0. The client
learns A with the task's loss, without augmentation, in eval mode, as in both released codes.
The clients' own models are evaluated (``evaluation.model=clients``); only the trained model
travels. SCAFFOLD's c_i counts from w_start on; FedCM's momentum contains w_start - x, too.

The authors' code learns A on 80 % of the examples, and in the second round repeats the pass until
the standard deviation of the last 10 passes' losses is below .1 (``until_std=0.1``, off by default;
it stops after 100 passes). FedDW's code takes all examples (``data_share=1``) and always one pass;
a client whose first round comes late mixes with the initial model; and BatchNorm's statistics stay
at the client. In both, the mixed tensors are ``head.*``; where that is personal, name others.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.common.kinds import NotNegative, Positive, Selector, ShareAboveZero
from fedhet.strategies.base import (
    Batch,
    ClientSide,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Tensors,
)
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.method import OWN_MODELS, Method
from fedhet.strategies.parts import Parts

LOCAL, MIXING = "fedala_local", "fedala_mixing"  # w_local and A, in the client state
_WINDOW = 10  # passes whose losses are compared
_MOST_PASSES = 100


class FedALAClient(ClientSide):
    """Starts local training between the client's last model and the global one.

    The arguments are :class:`FedALA`'s; other examples to learn A on are drawn every round.
    """

    moves_start = True

    def __init__(self, layers: str, eta: float, data_share: float, until_std: float | None) -> None:
        self.layers = TensorSelector(layers, "strategy.fedala.layers")
        self.eta, self.data_share, self.until_std = eta, data_share, until_std

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a selector that matches no shared tensor."""
        self.layers.select(shared)

    @torch.no_grad()
    def begin(self, context: LocalContext) -> None:
        """Learn A and put w_start into the model; in the first round do nothing."""
        self.selected = self.layers.select(context.anchor)
        if LOCAL not in context.state:
            return
        context.state[MIXING] = self._learnt(context)
        for name, value in _mixed(context, context.state[MIXING]).items():
            context.params[name].copy_(value)
        context.start_here()

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep w_local."""
        context.state[LOCAL] = {n: context.params[n].detach().clone() for n in self.selected}
        return {}

    def _learnt(self, context: LocalContext) -> Tensors:
        """Return A after this round's pass, or passes, over the same examples."""
        mixing = context.state.get(MIXING)
        until = self.until_std if mixing is None else None
        mixing = mixing or {name: torch.ones_like(context.anchor[name]) for name in self.selected}
        drawn = context.generator.get_state()
        losses: list[float] = []
        for _ in range(1 if until is None else _MOST_PASSES):
            context.generator.set_state(drawn)
            mixing, loss = self._after_pass(context, mixing)
            losses.append(loss)
            recent = losses[-_WINDOW:]
            if until is not None and len(losses) > _WINDOW and statistics.pstdev(recent) < until:
                break
        return mixing

    @torch.enable_grad()
    def _after_pass(self, context: LocalContext, mixing: Tensors) -> tuple[Tensors, float]:
        """Return A after a step on every mini-batch, and their mean loss."""
        losses = []
        for inputs, labels in self._examples(context):
            mixing = {name: value.detach().requires_grad_() for name, value in mixing.items()}
            mixed = _mixed(context, mixing)  # the global model's other tensors are frozen
            _, logits = functional_call(context.global_model, mixed, (inputs,))
            loss = context.loss(logits, labels)
            slopes = torch.autograd.grad(loss, list(mixing.values()))
            mixing = {
                name: (value.detach() - self.eta * slope).clamp(0.0, 1.0)
                for (name, value), slope in zip(mixing.items(), slopes, strict=True)
            }
            losses.append(loss.detach())
        return mixing, float(torch.stack(losses).mean())

    def _examples(self, context: LocalContext) -> Iterator[Batch]:
        left = max(1, round(self.data_share * len(context.data)))
        for inputs, labels in context.data.batches(
            context.batch_size, generator=context.generator, train=False
        ):
            yield inputs[:left], labels[:left]
            left -= len(labels)
            if left <= 0:
                return


def _mixed(context: LocalContext, mixing: Tensors) -> dict[str, Tensor]:
    """Return w_local + (w_global - w_local) A; exactly w_global where A is 1."""
    local = context.state[LOCAL]
    return {name: torch.lerp(local[name], context.anchor[name], a) for name, a in mixing.items()}


class FedALA(Method):
    """FedALA (Zhang et al. 2023): personalised; a client starts from a mix, learnt element by
    element, of its last model and the global one.
    """

    settings = OWN_MODELS

    layers: Selector = "head.*"
    """the tensors to mix: all | last:N | first:N | patterns; the others start as the global ones"""
    eta: NotNegative = 1.0
    """step size of the mixing weights; 0 is FedAvg"""
    data_share: ShareAboveZero = 0.8
    """share of a client's examples on which it learns the mix; FedDW's code: 1"""
    until_std: Positive | None = None
    """repeat the first pass until the last 10 losses' standard deviation is below this (the
    authors' code: .1); null: one pass"""

    def parts(self) -> Parts:
        """Mix the start of local training."""
        side = FedALAClient(self.layers, self.eta, self.data_share, self.until_std)
        return Parts(client_sides={"fedala": side})
