"""Packs a client's reply into one vector, and the mean of all vectors back into a reply.

Secure aggregation adds one vector per client and shows the server only the sum. :class:`Layout`
packs a client's whole reply into such a vector, and unpacks the mean of the vectors into the reply
of a mean client, which then stands for each of them. A method that needs only sums treats it like
the clients' own replies:

    u    = sum_i w_i u_i / sum_i w_i,   w_i = n_i (weighted mean) or 1 (plain mean)
    p    = sum_i p_i / |S|              for every payload, so that |S| replies have the same sum
    b    = sum_i n_i b_i / sum_i n_i    for every buffer;  n, K, lr_sum: means over the clients

Which methods need only sums follows from what their parts read (compatibility.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import STATE_LOST, ClientSide, Payloads, Reply, Tensors, Weighting
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.slots import SumAggregator
from fedhet.strategies.wire.compressed_records import per_example
from fedhet.strategies.wire.records import known_shapes, shapes_of

CLIPPED = "clipped-share"
# The metrics of a client that are summed, too; a client sends no others. The scores of a client's
# own model have plain means over clients; the others are weighted by n_i. Each has three numbers:
# its value and 1 if it is known, both times the weight, and 1 if the value is cut off.
METRICS = (
    CLIPPED,
    STATE_LOST,
    "train-loss",
    "received-loss",
    "received-accuracy",
    "personal-accuracy",
    "personal-test-accuracy",
    "personal-test-loss",
)
_NUMBERS = 3  # of each metric
_OWN = "personal-"
_PAYLOAD = "payloads/"
_COUNTS = 4  # numbers at the vector's start: 1, and the means of n, K and the step size

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Positions of the numbers of a reply in its vector."""

    update: Mapping[str, tuple[int, ...]]  # shapes of the trainable shared tensors
    buffers: Mapping[str, tuple[int, ...]]  # shapes of the shared buffers
    payloads: Mapping[str, Mapping[str, tuple[int, ...]]]  # shapes of the payloads' tensors
    per_example: frozenset[str]  # payloads that grow with the client's number of examples
    weighting: Weighting  # how the aggregator weighs clients
    max_examples: int  # divides n_i and everything that grows with it, so that numbers are near 1

    @classmethod
    def of_round(
        cls,
        client_sides: Mapping[str, ClientSide],
        step: ServerStep,
        tensors: Tensors,
        max_examples: int,
    ) -> Layout:
        """Return the layout of the replies to these tensors; refuse payloads of unknown shape."""
        names = {name for side in client_sides.values() for name in side.sends}
        shapes, expected = shapes_of(tensors), known_shapes(step.expected())
        if unknown := sorted(names - expected.keys()):
            raise ConfigError(
                f"strategy/secure_aggregation: the payloads {unknown} have no shape that the "
                "server knows before round 1, and a secure sum needs it: set it to none, or choose "
                "another method"
            )
        assert isinstance(step.aggregator, SumAggregator)  # it reads the sum
        return cls(
            update={name: shape for name, shape in shapes.items() if name not in step.buffers},
            buffers={name: shape for name, shape in shapes.items() if name in step.buffers},
            payloads={name: expected[name] for name in names},
            per_example=per_example(client_sides),
            weighting=step.aggregator.weighting,
            max_examples=max_examples,
        )

    @classmethod
    def of(cls, reply: Reply, weighting: Weighting, max_examples: int) -> Layout:
        """Return the layout of a reply like this one."""
        update, buffers = shapes_of(reply.update), shapes_of(reply.buffers)
        payloads = {name: shapes_of(tensors) for name, tensors in reply.payloads.items()}
        return cls(update, buffers, payloads, reply.per_example, weighting, max_examples)

    def __len__(self) -> int:
        """Return the length of a vector."""
        return _COUNTS + sum(math.prod(shape) for _, _, shape in self._blocks)

    def too_large(self, reply: Reply, limit: float) -> list[str]:
        """Return the metrics whose value does not fit into a vector of numbers up to ``limit``."""
        share = reply.num_examples / self.max_examples
        known = {name: reply.metrics[name] for name in METRICS if name in reply.metrics}
        return [name for name, value in known.items() if abs(_weight(name, share) * value) > limit]

    def pack(self, reply: Reply, cut: Collection[str] = ()) -> Vector:
        """Return the vector of a reply; ``cut`` are the metrics whose value is cut off."""
        share = reply.num_examples / self.max_examples
        step_size = reply.lr_sum / max(reply.num_steps, 1)  # small and alike: large sums are cut
        counts = [1.0, share, reply.num_steps / self.max_examples, step_size]
        values: list[Vector] = [np.array(counts)]
        for group, name, _ in self._blocks:
            if group == "metrics":
                weight, known = _weight(name, share), name in reply.metrics
                value = weight * reply.metrics.get(name, 0.0)
                values.append(np.array([value, weight * known, float(name in cut)]))
            else:
                own: Payloads = {"update": reply.update, "buffers": reply.buffers}
                tensors = own[group] if group in own else reply.payloads[_payload(group)]
                array = tensors[name].double().cpu().numpy().ravel()
                values.append(self._factor(group, share) * array)
        return np.concatenate(values)

    def cut_metrics(self, mean: Vector, size: int) -> list[str]:
        """Return the metrics that some of ``size`` clients have cut off."""
        flags = mean[-_NUMBERS * len(METRICS) :].reshape(-1, _NUMBERS)[:, -1]
        return [name for name, flag in zip(METRICS, flags, strict=True) if flag * size > 0.5]

    def unpack(self, mean: Vector, size: int, tolerance: float) -> Reply:
        """Return the reply of the mean of ``size`` clients' vectors, with id -1.

        A metric that some client has cut off is left out: its mean would be that of other numbers.

        Args:
            mean: of the vectors.
            size: number of clients.
            tolerance: a client's numbers are multiples of it.

        Raises:
            ValueError: if this cannot be a mean of vectors: the first number is not 1.
        """
        mean = np.where(np.abs(mean) < 0.5 * tolerance / size, 0.0, mean)  # exact zeros
        ones, share, steps, step_size = (float(value) for value in mean[:_COUNTS])
        if len(mean) != len(self) or not abs(ones - 1.0) <= tolerance or not share > 0.0:
            raise ValueError(
                f"this is not the mean of {len(self)} numbers of each client: it has {len(mean)} "
                f"numbers, and the first is {ones:.4g} instead of 1"
            )
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        metrics: dict[str, float] = {}
        at, cut = _COUNTS, self.cut_metrics(mean, size)
        for group, name, shape in self._blocks:
            length = math.prod(shape)
            values, at = mean[at : at + length], at + length
            if group != "metrics":
                scaled = values / self._factor(group, share)
                tensors[group][name] = torch.from_numpy(scaled.astype(np.float32)).reshape(shape)
            elif name not in cut and values[1] > 1e-4 * _weight(name, share):
                metrics[name] = float(values[0] / values[1])
        update, buffers = tensors.pop("update"), tensors.pop("buffers")
        payloads = {_payload(group): of_payload for group, of_payload in tensors.items()}
        num_examples, num_steps = (
            max(1, round(value * self.max_examples * size)) / size for value in (share, steps)
        )
        lr_sum = num_steps * step_size
        metrics |= {"num-examples": num_examples, "num-steps": num_steps, "lr-sum": lr_sum}
        counts = max(1, round(num_examples)), max(1, round(num_steps))
        return Reply(-1, *counts, lr_sum, update, payloads, metrics, buffers)

    @cached_property
    def _groups(self) -> dict[str, Mapping[str, tuple[int, ...]]]:
        payloads = {f"{_PAYLOAD}{name}": shapes for name, shapes in self.payloads.items()}
        return {"update": self.update, "buffers": self.buffers, **payloads}

    @cached_property
    def _blocks(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Group, name and shape of every part after the counts, in the same order everywhere."""
        tensors = [
            (group, name, shape)
            for group in sorted(self._groups)
            for name, shape in sorted(self._groups[group].items())
        ]
        return [*tensors, *(("metrics", name, (_NUMBERS,)) for name in METRICS)]

    def _factor(self, group: str, share: float) -> float:
        if group == "update":
            return share if self.weighting == "examples" else 1.0
        if group == "buffers":
            return share
        return 1 / self.max_examples if _payload(group) in self.per_example else 1.0


def _weight(metric: str, share: float) -> float:
    return 1.0 if metric.startswith(_OWN) else share


def _payload(group: str) -> str:
    return group.removeprefix(_PAYLOAD)
