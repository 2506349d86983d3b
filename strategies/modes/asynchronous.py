"""Asynchronous rounds: how many replies make a step, and how much a late one weighs.

FedBuff     Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba. Federated learning with buffered
            asynchronous aggregation. AISTATS 2022. https://arxiv.org/abs/2106.06639
FedAsync    Xie, Koyejo, Gupta. Asynchronous federated optimization. OPT 2020.
            https://arxiv.org/abs/1903.03934

M clients train at any time; the server steps when K replies are there, and waits for nobody else. A
reply is tau steps stale if the server took tau steps since the client got its model. It weighs

    constant     1
    polynomial   (1 + tau)^-a                                       FedBuff: a = 1/2
    hinge        1 if tau <= b, else 1 / (a (tau - b) + 1)          FedAsync, section 5

    FedBuff      x <- x + eta_g (1 / K) sum_i s(tau_i) (y_i - x_i)        x_i: what client i got
    FedAsync     x <- x + eta_g s(tau) (y_i - x),  K = 1,  eta_g its alpha

No server optimizer sees buffers: BatchNorm's statistics move by s(tau) alone, also in FedAsync.

There is one loop, :func:`collect`, over an iterator of arrivals: on a simulated system's clock
(simulated_clients.py), or from real clients (live_clients.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from flwr.app import Message
from torch import Tensor

from fedhet.common.configured import Configured, Key
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, NotNegative, Seed, Whole
from fedhet.strategies.base import ReplySum, Tensors
from fedhet.strategies.round.reply_fold import ReplyFold
from fedhet.strategies.round.selection import Arrived, Outcome, Selection

STARTS = 0x57  # stream of the run's seed: who starts next
Discount = Literal["constant", "polynomial", "hinge"]


class Asynchronous(Configured):
    """Settings of asynchronous rounds; the sampler's participation is M / N."""

    section = "strategy.asynchronous"

    buffer: Count = 10
    """K, how many replies make a step"""
    discount: Discount = "polynomial"
    """weight of a reply that is tau steps stale: polynomial, (1 + tau)^-exponent | hinge, 1 up to
    the threshold, then 1 / (exponent (tau - threshold) + 1) | constant, 1"""
    exponent: NotNegative = 0.5
    """a, the exponent of polynomial and hinge"""
    threshold: NotNegative = 4.0
    """b, the threshold of hinge"""
    max_staleness: Whole | None = None
    """the server rejects staler replies; null: it accepts all"""
    towards_model: bool = False
    """true: step towards y_i, as FedAsync does; false: along the client's change, as FedBuff"""
    seed: Annotated[Seed, Key("seed")] = 0

    def weight(self, staleness: int) -> float:
        """Return s(tau)."""
        if self.discount == "polynomial":
            return float((1 + staleness) ** -self.exponent)
        if self.discount == "hinge" and staleness > self.threshold:
            return 1.0 / (self.exponent * (staleness - self.threshold) + 1.0)
        return 1.0

    def too_old(self, staleness: int) -> bool:
        """Return whether a reply is too stale to count."""
        return self.max_staleness is not None and staleness > self.max_staleness

    def check(self, num_clients: int, least: int) -> None:
        """Refuse a step of more replies than there are clients, or of fewer than are needed."""
        if not least <= self.buffer <= num_clients:
            raise ConfigError(
                f"strategy.asynchronous.buffer={self.buffer} different clients make a step: it "
                f"must be from {least} (min_replies) to {num_clients} (clients)"
            )

    def selection(
        self,
        step: int,
        versions: Mapping[int, int],
        models: Mapping[int, Tensors],
        outcome: Outcome,
        clock: float,
        messages: Mapping[int, Message],
        arriving: Callable[[ReplyFold], Arrived] | None = None,
    ) -> Selection:
        """Return the selection of clients that have started from these versions."""
        discounts = {client: self.weight(step - 1 - v) for client, v in versions.items()}
        started = Started(versions, discounts, models, self.towards_model)
        rebase = started.rebase
        return Selection(messages, outcome, clock, versions, discounts, rebase, arriving)


@dataclass(frozen=True)
class Arrival:
    """A client that has finished its training, or failed."""

    client: int  # its id
    version: int  # the step after which it started
    reply: Message | None = None  # of a real client
    lost: str = ""  # why there is no reply


@dataclass
class Collected:
    """The clients of a step: versions of those in time, why others are lost, who was late."""

    versions: dict[int, int] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    late: list[int] = field(default_factory=list)


def collect(
    arrivals: Iterable[Arrival],
    settings: Asynchronous,
    step: int,
    take: Callable[[Arrival], bool] = lambda arrival: True,
) -> Collected:
    """Take arrivals until K of them count, or nobody trains any more.

    Args:
        arrivals: of different clients; the loop asks for the next one only if it needs it.
        settings: K, and which replies are too old.
        step: t.
        take: takes one; returns whether it counts.
    """
    found, counted = Collected(), 0
    for arrival in arrivals:
        client, version = arrival.client, arrival.version
        if arrival.lost:
            found.lost[client] = arrival.lost
        elif settings.too_old(step - 1 - version):
            found.late.append(client)
        else:
            found.versions[client] = version
            counted += take(arrival)
        if counted >= settings.buffer:
            break
    return found


@dataclass(frozen=True)
class Started:
    """Where the clients of a step started, which is not where the server is by now."""

    versions: Mapping[int, int]  # of the models that they got, by client id
    discounts: Mapping[int, float]  # s(tau), by client id
    models: Mapping[int, Tensors]  # x_v and the buffers, by version; FedBuff needs only the buffers
    towards_model: bool  # FedAsync's step, to y_i and not along y_i - x_i

    def rebase(self, total: ReplySum, tensors: Tensors) -> ReplySum:
        """Return the sum of steps from ``tensors`` to where the clients arrived.

        Buffers always step this way, so the result is a mean of the clients' and the server's.
        Changes of a variance, measured from an older one, could make it negative.
        """
        examples = math.fsum(reply.num_examples for reply in total.replies)
        shares = [r.num_examples * self.discounts[r.client_id] / examples for r in total.replies]
        total = replace(total, buffers=self._rebased(total, total.buffers, shares, tensors))
        if self.towards_model:
            update = self._rebased(total, total.update, total.weights, tensors)
            total = replace(total, update=update)
        return total

    def _rebased(
        self, total: ReplySum, changes: Tensors, weights: Sequence[float], tensors: Tensors
    ) -> dict[str, Tensor]:
        """Turn the weighted sum of y_i - x_i into the weighted sum of y_i - x."""
        moved: dict[str, Tensor] = {name: 0.0 * value for name, value in changes.items()}
        own = [self.versions[reply.client_id] for reply in total.replies]
        for version in sorted(set(own)):
            weight = math.fsum(w for of, w in zip(own, weights, strict=True) if of == version)
            kept = self.models[version]
            moved = {n: m + weight * (kept[n] - tensors[n]) for n, m in moved.items()}
        return {name: value + moved[name] for name, value in changes.items()}


def idle_clients(present: Sequence[int], busy: Collection[int]) -> list[int]:
    """Return the idle clients in order."""
    return [client for client in present if client not in busy]
