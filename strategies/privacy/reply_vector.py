"""Replies that a server knows the sum of, and no single one.

Secure aggregation adds up one vector of each client and shows the server the sum. So all that a
client sends is put into one vector (:class:`Layout`), and what comes back, the mean of the clients'
vectors, is taken apart into a reply again: that of the mean client, which then stands for each of
them. A method to which only sums matter does with these what it does with the clients' own:

    u    = sum_i w_i u_i / sum_i w_i,   w_i = n_i (weighted mean) or 1 (plain mean)
    p    = sum_i p_i / |S|              of every payload, so that |S| replies sum to what they did
    b    = sum_i n_i b_i / sum_i n_i    of every buffer;  n, K, lr_sum: means over the clients

Which methods those are is derived from what their parts declare (:func:`require_sums`): an
aggregator that is a weighted mean, an output that reads no reply, server sides that sum payloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import ConfigError
from strategies.base import (
    STATE_LOST,
    Aggregator,
    ClientSide,
    MeanAggregator,
    Observer,
    Output,
    ReadsNoReply,
    Reply,
    ReplyTransform,
    ServerSide,
    Shapes,
    Tensors,
    Weighting,
)
from strategies.components.aggregators import mean_of

CLIPPED = "clipped-share"
# What of a client's metrics is summed, too: others are not sent. The scores of a client's own model
# are plain means over clients, the rest is weighted by n_i.
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
_OWN = "personal-"
_COUNTS = ("ones", "num-examples", "num-steps", "lr-sum")

Vector = NDArray[np.float64]


# ---- which methods -------------------------------------------------------------------------------


def require_sums(
    what: str,
    client_sides: Mapping[str, ClientSide],
    server_sides: Mapping[str, ServerSide],
    aggregator: Aggregator,
    transforms: Sequence[ReplyTransform],
    output: Output,
    observers: Sequence[Observer] = (),
    *,
    summed: bool,
) -> Weighting:
    """Return how the aggregator weighs clients, if no part of the method reads single replies.

    Args:
        what: the key that leaves the server with the sum only.
        client_sides: of the method, by name.
        server_sides: of the method, by name.
        aggregator: of the method.
        transforms: of the method.
        output: of the method.
        observers: of the run.
        summed: they are summed before the server has them; or else by the server, in the
            ``receive`` of a side, which itself still reads single replies.

    Raises:
        ConfigError: naming every part that reads single replies, and why.
    """
    readers = [
        side
        for side in server_sides.values()
        if _reads_single(side) and (summed or not side.averages)
    ]
    reasons = [
        *_reasons(
            "strategy.aggregator", [] if isinstance(aggregator, MeanAggregator) else [aggregator]
        ),
        *_reasons("strategy.transforms", transforms),
        *_reasons("strategy.output", [] if isinstance(output, ReadsNoReply) else [output]),
        *_reasons("strategy.server_sides", readers),
        *_reasons("diagnostics", observers),
        *_unsummed(client_sides, server_sides),
    ]
    if reasons or not isinstance(aggregator, MeanAggregator):
        raise ConfigError(
            f"{what} gives the server the sum of the clients' replies and no single one, but "
            f"{'; '.join(reasons)}. Set {what}=none, or choose another method"
        )
    return aggregator.weighting


def _reasons(key: str, parts: Sequence[object]) -> Iterator[str]:
    for part in parts:
        reason = getattr(part, "individual", "it reads the clients' replies one by one")
        yield f"{key} {type(part).__name__}: {reason}"


def _reads_single(side: ServerSide) -> bool:
    kind = type(side)
    reads = kind.reduce is not ServerSide.reduce or kind.receive is not ServerSide.receive
    return reads and side.additive_payloads is None


def _unsummed(
    client_sides: Mapping[str, ClientSide], server_sides: Mapping[str, ServerSide]
) -> Iterator[str]:
    summed = {name for side in server_sides.values() for name in side.additive_payloads or ()}
    for key, side in client_sides.items():
        for name in sorted(side.sends - summed):
            yield f"strategy.client_sides.{key}: {name} is read client by client"


def require_private(client_sides: Mapping[str, ClientSide]) -> None:
    """Refuse payloads that clipping by client does not cover, and that nothing else covers.

    Raises:
        ConfigError: naming them.
    """
    if not any(side.clips for side in client_sides.values()):
        return
    private = {name for side in client_sides.values() for name in side.private}
    if bare := sorted(per_example(client_sides) - private):
        raise ConfigError(
            f"the payloads {bare} are sums over a client's examples, which "
            "strategy/differential_privacy does not clip, and have no noise of their own: set that "
            "(strategy.soft_labels.noise_multiplier for soft labels), or choose another method"
        )


# ---- the vector ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where the numbers of a reply stand in its vector.

    Args:
        update: the trainable shared tensors' shapes.
        buffers: those of the shared buffers.
        payloads: those of the payloads' tensors.
        per_example: payloads that grow with the client's number of examples.
        weighting: how the aggregator weighs clients.
        max_examples: what n_i and all that grows with it are divided by, to be of the size of 1.
    """

    update: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    payloads: Shapes
    per_example: frozenset[str]
    weighting: Weighting
    max_examples: int

    @classmethod
    def of(
        cls,
        reply: Reply,
        weighting: Weighting,
        max_examples: int,
    ) -> Layout:
        """Return the layout of a reply like this one."""
        return cls(
            shapes_of(reply.update),
            shapes_of(reply.buffers),
            {name: shapes_of(tensors) for name, tensors in reply.payloads.items()},
            reply.per_example,
            weighting,
            max_examples,
        )

    def __len__(self) -> int:
        """Return how many numbers a vector has."""
        return sum(size for _, _, size, _ in self._blocks)

    def pack(self, reply: Reply) -> Vector:
        """Return a reply's vector."""
        share = reply.num_examples / self.max_examples
        values: list[Vector] = [
            np.array([1.0, share, reply.num_steps / self.max_examples, _step_size(reply)])
        ]
        for group, name, _, _ in self._blocks[1:]:
            if group == "metrics":
                weight = 1.0 if name.startswith(_OWN) else share
                known = name in reply.metrics
                values.append(np.array([weight * reply.metrics.get(name, 0.0), weight * known]))
            else:
                factor = self._factor(group, share)
                values.append(
                    factor * self._tensors(reply, group)[name].double().cpu().numpy().ravel()
                )
        return np.concatenate(values)

    def unpack(self, mean: Vector, size: int, tolerance: float) -> Reply:
        """Return the reply of the mean client, whose id is -1.

        Args:
            mean: of the clients' vectors.
            size: how many clients.
            tolerance: a client's numbers are multiples of it.

        Raises:
            ValueError: if this is no mean of vectors: the first number is not 1.
        """
        mean = np.where(np.abs(mean) < 0.5 * tolerance / size, 0.0, mean)  # nobody's is exactly 0
        ones, share, steps, step_size = (float(value) for value in mean[: len(_COUNTS)])
        if len(mean) != len(self) or not abs(ones - 1.0) <= tolerance or not share > 0.0:
            raise ValueError(
                f"this is no mean of {len(self)} numbers of each client: {len(mean)} numbers, of "
                f"which the first is {ones:.4g} and not 1"
            )
        update: dict[str, Tensor] = {}
        buffers: dict[str, Tensor] = {}
        payloads: dict[str, dict[str, Tensor]] = {name: {} for name in self.payloads}
        metrics: dict[str, float] = {}
        at = len(_COUNTS)
        for group, name, size, shape in self._blocks[1:]:
            values, at = mean[at : at + size], at + size
            if group == "metrics":
                if values[1] > 1e-4 * (1.0 if name.startswith(_OWN) else share):
                    metrics[name] = float(values[0] / values[1])
                continue
            scaled = values / self._factor(group, share)
            tensor = torch.from_numpy(scaled.astype(np.float32)).reshape(shape)
            target = {"update": update, "buffers": buffers}.get(group)
            (payloads[group.removeprefix("payloads/")] if target is None else target)[name] = tensor
        num_examples, num_steps = (
            max(1, round(value * self.max_examples * size)) / size for value in (share, steps)
        )
        lr_sum = num_steps * step_size
        metrics |= {"num-examples": num_examples, "num-steps": num_steps, "lr-sum": lr_sum}
        counts = max(1, round(num_examples)), max(1, round(num_steps))
        return Reply(-1, *counts, lr_sum, update, payloads, metrics, buffers)

    @cached_property
    def _blocks(self) -> list[tuple[str, str, int, tuple[int, ...]]]:
        """Group, name, size and shape of every part; in an order that all parties come to."""
        groups = {"update": self.update, "buffers": self.buffers}
        groups |= {f"payloads/{name}": shapes for name, shapes in self.payloads.items()}
        tensors = [
            (group, name, math.prod(shape), shape)
            for group in sorted(groups)
            for name, shape in sorted(groups[group].items())
        ]
        return [
            ("counts", "", len(_COUNTS), (len(_COUNTS),)),
            *tensors,
            *(("metrics", name, 2, (2,)) for name in METRICS),
        ]

    def _factor(self, group: str, share: float) -> float:
        if group == "update":
            return share if self.weighting == "examples" else 1.0
        if group == "buffers":
            return share
        return 1 / self.max_examples if group.removeprefix("payloads/") in self.per_example else 1.0

    @staticmethod
    def _tensors(reply: Reply, group: str) -> Tensors:
        if group == "update":
            return reply.update
        return reply.buffers if group == "buffers" else reply.payloads[group[len("payloads/") :]]


def _step_size(reply: Reply) -> float:
    """Return what a step counts in lr_sum: alike at all clients, and small, as sums are cut off."""
    return reply.lr_sum / max(reply.num_steps, 1)


def per_example(client_sides: Mapping[str, ClientSide]) -> frozenset[str]:
    """Return the payloads that grow with a client's number of examples."""
    return frozenset(name for side in client_sides.values() for name in side.per_example)


def mean_reply(replies: Sequence[Reply]) -> Reply:
    """Return the reply of the mean client, whose id is -1; every client counts the same."""
    size, alike = len(replies), [1.0] * len(replies)
    payloads = {
        name: mean_of([reply.payloads[name] for reply in replies], alike)
        for name in replies[0].payloads
    }
    return Reply(
        -1,
        max(1, round(sum(reply.num_examples for reply in replies) / size)),
        max(1, round(sum(reply.num_steps for reply in replies) / size)),
        sum(reply.lr_sum for reply in replies) / size,
        mean_of([reply.update for reply in replies], alike),
        payloads,
        buffers=mean_of([reply.buffers for reply in replies], alike),
        per_example=replies[0].per_example,
    )


def shapes_of(tensors: Tensors) -> dict[str, tuple[int, ...]]:
    """Return the shapes by name."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def beyond(vector: Vector, limit: float) -> float:
    """Return the share of the numbers whose size is above the limit."""
    return float(np.mean(np.abs(vector) > limit))


def stand_ins(mean: Reply, replies: Sequence[Reply]) -> list[Reply]:
    """Return the mean reply in the place of each of the replies."""
    return [replace(mean, client_id=reply.client_id) for reply in replies]
