"""IFCA: an efficient framework for clustered federated learning.

Ghosh, Chung, Yin, Ramchandran. NeurIPS 2020. https://arxiv.org/abs/2006.04088

The clients fall into k groups that nobody knows, and each group wants a model of its own. All k
models theta_j go to every client, which trains the one that fits its examples best (Algorithm 1):

    j_i = argmin_j F_i(theta_j)                    F_i: the task's loss on all examples of client i
    y_i: E epochs of the local optimizer from theta_{j_i}
    theta_j <- theta_j + eta_g sum_{i: j_i = j} (n_i / N_j) (y_i - theta_j)

N_j sums the n_i of the clients that chose j in models mode (``averaging=models``, option II), and
of all clients of the round with ``gradients`` (option I, with one step on all examples). The paper
has clients of equal size. A model that nobody chose stays as it is.

x is theta_1; the other theta_j travel as a payload, and of ``layers`` alone: what is outside is
trained by all clients as in FedAvg, as where the paper shares a network's first layers. k = 1 is
FedAvg to the bit. Every model begins with random numbers: theta_j with those of x, tensor by
tensor in another order. The k models must differ for the groups to part, and by chance one of them
may win all clients: try other seeds.

The evaluated models are the y_i (``evaluation.model=clients``); the authors' code scores theta_j,
with j chosen on the examples that are scored. Buffers, such as BatchNorm's statistics, are shared
by all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from fedhet.common.kinds import Count, Selector
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
from fedhet.strategies.components.server_optimizers import SGD
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.method import OWN_MODELS, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.reply_fold import Weights, sum_of

CLUSTERS = "cluster_models"  # theta_2 to theta_k; their tensors are called J:NAME, J from 1
CHOICE = "cluster_choice"  # 1 at the chosen model, 0 at the others (k,)
OWN = "ifca"  # y_i, in the client state
Averaging = Literal["models", "gradients"]


class IFCAClient(ClientSide):
    """Starts from the model with the lowest loss on the client's examples."""

    needs, sends = frozenset({CLUSTERS}), frozenset({CHOICE})
    moves_start = True
    own_state = frozenset({OWN})

    def __init__(self, clusters: int) -> None:
        self.clusters = clusters

    @torch.no_grad()
    def begin(self, context: LocalContext) -> None:
        """Choose a model and put it in."""
        models: list[dict[str, Tensor]] = [{} for _ in range(self.clusters)]
        for key, value in context.received[CLUSTERS].items():
            number, _, name = key.partition(":")
            models[int(number)][name] = value
        losses = [_loss(context, model) for model in models]
        self.chosen = losses.index(min(losses))
        self.names = list(models[-1])
        chosen = models[self.chosen]
        for name, value in chosen.items():
            context.params[name].copy_(value)
        context.start_here()
        # what other methods pull to, or compare with, is theta_j as well
        context.anchor = {**context.anchor, **chosen}
        context.global_model.load_state_dict(chosen, strict=False)

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep y_i and send the choice."""
        context.state[OWN] = {name: context.params[name].detach().clone() for name in self.names}
        return {CHOICE: {CHOICE: torch.eye(self.clusters)[self.chosen]}}

    def own_model(self, context: LocalContext) -> Tensors:
        """Return y_i."""
        return context.state[OWN]


def _loss(context: LocalContext, model: Tensors) -> float:
    """Return the mean loss over the client's examples of x with other tensors in place."""
    total = 0.0
    for inputs, labels in context.data.batches(context.batch_size, generator=None, train=False):
        _, logits = functional_call(context.global_model, dict(model), (inputs,))
        total += len(labels) * float(context.loss(logits, labels))
    return total / len(context.data)


class IFCAServer(ServerSide):
    """Keeps the models beside x, and averages each over the clients that chose it."""

    needs, sends = frozenset({CHOICE}), frozenset({CLUSTERS})
    kept = ("models",)
    reads = Reads.MODELS
    weighs: ClassVar[Weighting] = "examples"

    def __init__(self, clusters: int, layers: str, averaging: Averaging, lr: float) -> None:
        self.clusters, self.averaging, self.lr = clusters, averaging, lr
        self.layers = TensorSelector(layers, "strategy.ifca.layers")

    def init(self, params: Tensors) -> None:
        """Start every model with the numbers of x in an order of its own."""
        self.names = self.layers.select(params)
        # one object for all clients of a round: it is serialised once
        self.models: dict[str, Tensor] = {}
        for number in range(1, self.clusters):
            generator = torch.Generator().manual_seed(number)
            for name in self.names:
                order = torch.randperm(params[name].numel(), generator=generator)
                shuffled = params[name].flatten()[order].view_as(params[name])
                self.models[f"{number}:{name}"] = shuffled

    def broadcast(self, client_id: int) -> Payloads:
        """Send all models but x."""
        return {CLUSTERS: self.models}

    def expected(self) -> Shapes:
        """One number for each model."""
        return {CHOICE: {CHOICE: (self.clusters,)}}

    def check(self, reply: Reply) -> None:
        """Refuse what does not choose one model."""
        choice = reply.payloads[CHOICE][CHOICE].tolist()
        if sorted(choice) != [0.0] * (self.clusters - 1) + [1.0]:
            raise RefusedReplyError(f"its {CHOICE} is {choice}: one must be 1 and the others 0")

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return Delta of x, and move the other models; the aggregator."""
        update = _mean(replies) | {name: torch.zeros_like(params[name]) for name in self.names}
        models = dict(self.models)
        for number in range(self.clusters):
            chose = [r for r in replies if r.payloads[CHOICE][CHOICE][number] == 1.0]
            share = _examples(chose) / _examples(replies) if self.averaging == "gradients" else 1.0
            mean = _mean(chose) if chose else {}
            for name in mean.keys() & set(self.names):
                theta = models.get(f"{number}:{name}", params[name])
                step = share * (params[name] - theta + mean[name])
                if number == 0:
                    update[name] = step
                else:
                    models[f"{number}:{name}"] = theta + self.lr * step
        self.models = models
        return update


def _mean(replies: Sequence[Reply]) -> dict[str, Tensor]:
    """Return the mean of the updates by examples, to the bits of FedAvg's."""
    return dict(sum_of(replies, Weights("examples")).update)


def _examples(replies: Sequence[Reply]) -> int:
    return sum(reply.num_examples for reply in replies)


class IFCA(Method):
    """IFCA (Ghosh et al. 2020): clustered; each client trains that of k models which fits its
    examples best, for clients that fall into groups.
    """

    replaces = frozenset({"aggregator", "server_optimizer"})
    settings = OWN_MODELS
    requires = MappingProxyType({"strategy.aggregator": None, "strategy.server_optimizer": None})

    clusters: Count = 2
    """k, the number of models; 1 is FedAvg"""
    layers: Selector = "all"
    """the tensors of which every group has its own: all | last:N | first:N | patterns; the others
    are FedAvg's"""
    averaging: Averaging = "models"
    """models: the mean over the clients that chose a model (option II) | gradients: their sum over
    the number of all clients (option I)"""

    def parts(self) -> Parts:
        """Add both halves, and a step for each model."""
        server = IFCAServer(self.clusters, self.layers, self.averaging, self.server_lr)
        return Parts(
            client_sides={"ifca": IFCAClient(self.clusters)},
            server_sides={"ifca": server},
            aggregator=server,
            server_optimizer=SGD(lr=self.server_lr),
        )
