"""Packs a client's reply into one vector, and the mean of all vectors back into a reply.

Secure aggregation adds one vector per client and shows the server only the sum. :class:`Layout`
packs all that a client sends into such a vector and unpacks the mean of the vectors into the reply
of a mean client, which then stands for each of them. A method that needs only sums does with it
what it does with the clients' own replies:

    u    = sum_i w_i u_i / sum_i w_i,   w_i = n_i (weighted mean) or 1 (plain mean)
    p    = sum_i p_i / |S|              for every payload, so that |S| replies have the same sum
    b    = sum_i n_i b_i / sum_i n_i    for every buffer;  n, K, lr_sum: means over the clients

:func:`require_sums` derives from a method's parts whether it needs only sums: its aggregator is a
weighted mean, its output reads no reply, and its server sides sum payloads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    STATE_LOST,
    ClientSide,
    Payloads,
    Reply,
    ReplySum,
    ServerSide,
    Tensors,
    Weighting,
)
from fedhet.strategies.round.exact_sum import norms_of
from fedhet.strategies.round.reply_fold import per_example, shapes_of, summed_payloads
from fedhet.strategies.slots import (
    Aggregator,
    Observer,
    Output,
    ReadsNoReply,
    ReplyTransform,
    SumAggregator,
)

CLIPPED = "clipped-share"
# The metrics of a client that are summed, too; others are not sent. The scores of a client's own
# model have plain means over clients, the others are weighted by n_i.
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
_PAYLOAD = "payloads/"
_COUNTS = 4  # numbers at the vector's start: 1, and the means of n, K and the step size

Vector = NDArray[np.float64]


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
    """Reject parts of a method that read single replies; return how the aggregator weighs clients.

    Args:
        what: the key that gives the server only the sum.
        client_sides, server_sides, aggregator, transforms, output: of the method.
        observers: of the run.
        summed: replies are summed before they reach the server; otherwise the ``receive`` of a
            server side sums them and may read single replies itself.

    Raises:
        ConfigError: names every part that reads single replies, and why.
    """
    readers = [
        side
        for side in server_sides.values()
        if side.keeps_replies and (summed or not side.averages)
    ]
    reasons = [
        *_reasons("strategy.aggregator", [] if _reads_sum(aggregator) else [aggregator]),
        *_reasons("strategy.transforms", transforms),
        *_reasons("strategy.output", [] if isinstance(output, ReadsNoReply) else [output]),
        *_reasons("strategy.server_sides", readers),
        *chain.from_iterable(
            _reasons(getattr(one, "key", "observers"), [one])
            for one in observers
            if getattr(one, "keeps_replies", True) or hasattr(one, "individual")
        ),
        *_unsummed(client_sides, server_sides),
    ]
    if reasons or not isinstance(aggregator, SumAggregator):
        raise ConfigError(
            f"{what} gives the server the sum of the clients' replies only, but "
            f"{'; '.join(reasons)}. Set {what}=none, or choose another method"
        )
    return aggregator.weighting


def _reasons(key: str, parts: Sequence[object]) -> Iterator[str]:
    for part in parts:
        reason = getattr(part, "individual", "it reads the clients' replies one by one")
        yield f"{key} {type(part).__name__}: {reason}"


def _reads_sum(aggregator: Aggregator) -> bool:
    return isinstance(aggregator, SumAggregator) and not hasattr(aggregator, "individual")


def _unsummed(
    client_sides: Mapping[str, ClientSide], server_sides: Mapping[str, ServerSide]
) -> Iterator[str]:
    summed = summed_payloads(server_sides)
    for key, side in client_sides.items():
        for name in sorted(side.sends - summed):
            yield f"strategy.client_sides.{key}: {name} is read client by client"


def require_private(client_sides: Mapping[str, ClientSide]) -> None:
    """Reject payloads that neither clipping nor noise of their own protects."""
    if not any(side.clips for side in client_sides.values()):
        return
    private = {name for side in client_sides.values() for name in side.private}
    if bare := sorted(per_example(client_sides) - private):
        raise ConfigError(
            f"the payloads {bare} are sums over a client's examples, which "
            "strategy/differential_privacy does not clip, and have no noise of their own: set "
            "strategy.soft_labels.noise_multiplier (for soft labels), or choose another method"
        )


def require_no_buffers(client_sides: Mapping[str, ClientSide], shared: Collection[str]) -> None:
    """Reject BatchNorm's running statistics under differential privacy: ``shared`` ones travel.

    A noisy variance is no variance.
    """
    if shared and any(side.clips for side in client_sides.values()):
        raise ConfigError(
            f"strategy/differential_privacy covers trained tensors only, and the model also sends "
            f"{min(shared)}: choose a task.model without running statistics (resnet18_gn), keep "
            "them at the clients (strategy.personal), or set strategy/differential_privacy=none"
        )


@dataclass(frozen=True)
class Layout:
    """Positions of the numbers of a reply in its vector.

    Args:
        update: shapes of the trainable shared tensors.
        buffers: shapes of the shared buffers.
        payloads: shapes of the payloads' tensors.
        per_example: payloads that grow with the client's number of examples.
        weighting: how the aggregator weighs clients.
        max_examples: divides n_i and all that grows with it, so that numbers are of order 1.
    """

    update: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[int, ...]]
    payloads: Mapping[str, Mapping[str, tuple[int, ...]]]
    per_example: frozenset[str]
    weighting: Weighting
    max_examples: int

    @classmethod
    def of(cls, reply: Reply, weighting: Weighting, max_examples: int) -> Layout:
        """Return the layout of a reply like this one."""
        update, buffers = shapes_of(reply.update), shapes_of(reply.buffers)
        payloads = {name: shapes_of(tensors) for name, tensors in reply.payloads.items()}
        return cls(update, buffers, payloads, reply.per_example, weighting, max_examples)

    def __len__(self) -> int:
        """Return the length of a vector."""
        return _COUNTS + sum(math.prod(shape) for _, _, shape in self._blocks)

    def pack(self, reply: Reply) -> Vector:
        """Return the vector of a reply."""
        share = reply.num_examples / self.max_examples
        step_size = reply.lr_sum / max(reply.num_steps, 1)  # small and alike: large sums are cut
        counts = [1.0, share, reply.num_steps / self.max_examples, step_size]
        values: list[Vector] = [np.array(counts)]
        for group, name, _ in self._blocks:
            if group == "metrics":
                weight = 1.0 if name.startswith(_OWN) else share
                known = name in reply.metrics
                values.append(np.array([weight * reply.metrics.get(name, 0.0), weight * known]))
            else:
                own: Payloads = {"update": reply.update, "buffers": reply.buffers}
                tensors = own[group] if group in own else reply.payloads[_payload(group)]
                array = tensors[name].double().cpu().numpy().ravel()
                values.append(self._factor(group, share) * array)
        return np.concatenate(values)

    def unpack(self, mean: Vector, size: int, tolerance: float) -> Reply:
        """Return the reply of the mean of ``size`` clients' vectors, with id -1.

        Args:
            mean: of the vectors.
            size: number of clients.
            tolerance: a client's numbers are multiples of it.

        Raises:
            ValueError: if this is no mean of vectors: the first number is not 1.
        """
        mean = np.where(np.abs(mean) < 0.5 * tolerance / size, 0.0, mean)  # exact zeros
        ones, share, steps, step_size = (float(value) for value in mean[:_COUNTS])
        if len(mean) != len(self) or not abs(ones - 1.0) <= tolerance or not share > 0.0:
            raise ValueError(
                f"this is no mean of {len(self)} numbers of each client: it has {len(mean)} "
                f"numbers, and the first is {ones:.4g} instead of 1"
            )
        tensors: dict[str, dict[str, Tensor]] = {group: {} for group in self._groups}
        metrics: dict[str, float] = {}
        at = _COUNTS
        for group, name, shape in self._blocks:
            length = math.prod(shape)
            values, at = mean[at : at + length], at + length
            if group != "metrics":
                scaled = values / self._factor(group, share)
                tensors[group][name] = torch.from_numpy(scaled.astype(np.float32)).reshape(shape)
            elif values[1] > 1e-4 * (1.0 if name.startswith(_OWN) else share):
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
        return [*tensors, *(("metrics", name, (2,)) for name in METRICS)]

    def _factor(self, group: str, share: float) -> float:
        if group == "update":
            return share if self.weighting == "examples" else 1.0
        if group == "buffers":
            return share
        return 1 / self.max_examples if _payload(group) in self.per_example else 1.0


def _payload(group: str) -> str:
    return group.removeprefix(_PAYLOAD)


def mean_reply(total: ReplySum, size: int) -> Reply:
    """Return the sum of equally weighted replies over ``size``, with client id -1."""
    count = len(total.replies)

    def scaled(tensors: Tensors, factor: float) -> dict[str, Tensor]:
        return {name: factor * value for name, value in tensors.items()}

    return Reply(
        -1,
        max(1, round(sum(reply.num_examples for reply in total.replies) / count)),
        max(1, round(sum(reply.num_steps for reply in total.replies) / count)),
        math.fsum(reply.lr_sum for reply in total.replies) / count,
        scaled(total.update, count / size),
        {name: scaled(tensors, 1 / size) for name, tensors in total.payloads.items()},
        buffers=dict(total.buffers),
        per_example=total.replies[0].per_example,
    )


def copies(reply: Reply, size: int) -> ReplySum:
    """Return the sum of ``size`` copies of a reply."""
    bare = replace(reply, update={}, payloads={}, buffers={}, norms=norms_of(reply.update))
    payloads = {
        name: {tensor: size * value for tensor, value in tensors.items()}
        for name, tensors in reply.payloads.items()
    }
    return ReplySum([bare] * size, [1 / size] * size, reply.update, payloads, reply.buffers)
