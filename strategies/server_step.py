"""The server's step, free of Flower: valid replies in, new params out, and the state between."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from strategies.aggregators import mean_of
from strategies.base import (
    Aggregator,
    Cohort,
    Payloads,
    Reply,
    ReplyTransform,
    ServerOptimizer,
    ServerSide,
    Shapes,
    Tensors,
)
from strategies.diagnostics import diagnose


class ServerStep:
    """transforms -> aggregator -> server optimiser -> every side's reduce.

    Args:
        sides: the methods' server halves, by name.
        aggregator: (x, replies) -> Delta.
        optimizer: (x, Delta) -> x.
        transforms: (x, replies) -> replies, applied in order.
        buffers: names that are not trained: they get the example-weighted mean, and neither sides
            nor aggregator nor optimiser see them.
    """

    def __init__(
        self,
        sides: Mapping[str, ServerSide],
        aggregator: Aggregator,
        optimizer: ServerOptimizer,
        transforms: Sequence[ReplyTransform],
        buffers: Collection[str],
    ) -> None:
        self.sides = dict(sides)
        self.aggregator = aggregator
        self.optimizer = optimizer
        self.transforms = tuple(transforms)
        self.buffers = frozenset(buffers)
        self._diagnostics: dict[str, float] = {}

    def init(self, tensors: Tensors, state: Payloads) -> None:
        """Start from ``tensors``; ``state`` (of :meth:`state_dict`) is restored if not empty."""
        params = self._trainable(tensors)
        for owner, part in self._parts().items():
            part.init(params)
            groups = {
                name.removeprefix(f"{owner}/"): values
                for name, values in state.items()
                if name.startswith(f"{owner}/")
            }
            if groups:
                part.load_state_dict(groups)

    def broadcast(self, client: int) -> dict[str, Tensors]:
        """Return all payloads for one client."""
        return {
            name: tensors
            for side in self.sides.values()
            for name, tensors in side.broadcast(client).items()
        }

    def expected(self) -> Shapes:
        """Return the shapes of those reply payloads that a side knows."""
        return {
            name: shapes for side in self.sides.values() for name, shapes in side.expected().items()
        }

    def __call__(
        self, tensors: Tensors, replies: Sequence[Reply], round: int, population: int
    ) -> dict[str, Tensor]:
        """Return the new tensors, buffers included.

        Args:
            tensors: x and the buffers, as they were sent.
            replies: at least one, sorted by client id.
            round: t.
            population: N.
        """
        params = self._trainable(tensors)
        cohort = Cohort(round, len(replies), population)
        received = replies
        for transform in self.transforms:
            replies = transform(params, replies)
        update = self.aggregator(params, replies)
        self._diagnostics = diagnose(received, update)
        stepped = self.optimizer.step(params, update, cohort)
        for side in self.sides.values():
            side.reduce(replies, update, cohort)
        return {**tensors, **stepped, **self._mean_buffers(tensors, replies)}

    def metrics(self) -> dict[str, float]:
        """Return how far the round's updates agree, and what the sides report."""
        reported = [side.metrics() for side in self.sides.values()]
        return self._diagnostics | {n: value for part in reported for n, value in part.items()}

    def state_dict(self) -> dict[str, Tensors]:
        """Return every part's state, by "<owner>/<group>"."""
        return {
            f"{owner}/{group}": values
            for owner, part in self._parts().items()
            for group, values in part.state_dict().items()
        }

    def _parts(self) -> dict[str, ServerSide | ServerOptimizer]:
        return {"server_optimizer": self.optimizer, **self.sides}

    def _trainable(self, tensors: Tensors) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if name not in self.buffers}

    def _mean_buffers(self, tensors: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        if not self.buffers:
            return {}
        mean = mean_of([r.buffers for r in replies], [r.num_examples for r in replies])
        return {name: tensors[name] + change for name, change in mean.items()}
