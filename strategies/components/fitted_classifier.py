"""An output whose classifier the server computes from sums over all clients' examples.

The clients measure the features of the model that the round sent, and the output is that model, so
that of the round before: training goes on from the new x, with the same bits as without this
output.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Reads,
    Reply,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.components.tensor_selection import linear_classifier
from fedhet.strategies.round.server_model import ServerModel

# (the sums, the classifier to overwrite: a linear layer on the CPU)
Fit = Callable[[Tensors, nn.Linear], None]
_BATCH = 500  # examples at once; nothing depends on it but speed


class FeatureSums(ClientSide):
    """Sends sums over its examples of what the received model makes of them, in eval mode.

    Args:
        payload: its name.
        does: what the method does to a classifier, for the error about one that is not linear.
        sums: (features (B, d), one-hot labels (B, C)), both float64 -> the sums over a batch.
    """

    by_class = True

    def __init__(
        self, payload: str, does: str, sums: Callable[[Tensor, Tensor], dict[str, Tensor]]
    ) -> None:
        self.sends = self.per_example = frozenset({payload})
        self.dtypes = {payload: torch.float64}
        self._payload, self._does, self._sums = payload, does, sums

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a classifier that is not linear."""
        linear_classifier(model, self._does)

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Send the sums over all examples."""
        found = []
        for inputs, labels in context.data.batches(_BATCH, generator=None, train=False):
            features = context.global_model(inputs)[0].double()
            found.append(self._sums(features, one_hot(labels, context.num_classes).double()))
        return {self._payload: {n: torch.stack([one[n] for one in found]).sum(0) for n in found[0]}}


class KeptSums(ServerSide):
    """Keeps the round's sums of one payload for the output.

    Args:
        payload: its name.
        shapes: of its tensors, from the number of classes C and of features d.
    """

    def __init__(
        self, payload: str, shapes: Callable[[int, int], dict[str, tuple[int, ...]]]
    ) -> None:
        self.needs = frozenset({payload})
        self._payload, self._shapes = payload, shapes

    def init(self, params: Tensors) -> None:
        """Note the classifier's shape."""
        self._classifier = params["head.weight"].shape

    def expected(self) -> Shapes:
        """Return the shapes of the sums."""
        return {self._payload: self._shapes(*self._classifier)}

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """Note the sums."""
        self.sums = total.payloads[self._payload]


class FittedClassifier:
    """The output: x as it was sent, with its buffers, and a classifier fitted to the sums."""

    reads = Reads.SUM

    def __init__(self, sums: KeptSums, fit: Fit) -> None:
        self.sums, self.fit = sums, fit

    def bind(self, network: ServerModel) -> None:
        """Take the network."""
        self._network = network

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return that model's tensors."""
        model = self._network.model
        state = model.state_dict()
        buffers = {n for n, one in model.named_buffers() if one.is_floating_point() and n in state}
        sent = {name: state[name].detach().cpu().clone() for name in {*params, *buffers}}
        head = copy.deepcopy(model.get_submodule("head")).cpu()
        assert isinstance(head, nn.Linear)  # the client sides refuse others
        self.fit(self.sums.sums, head)
        return sent | {f"head.{name}": value.detach() for name, value in head.named_parameters()}
