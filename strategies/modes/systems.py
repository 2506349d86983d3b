"""Slow, absent and vanishing clients of a simulation, on a clock of its own.

A client that is asked answers so many simulated seconds later:

    s_i n (examples that it trains on, all epochs) * seconds_per_example
        + (bytes down + bytes up) / (megabytes_per_second / s_i),       s_i its slowness, 1 is usual

The sampler chooses k of the clients that are there. ``over_selection`` asks some more, and the
round takes the first k that answer; what comes after ``deadline_seconds`` is late. Who drops out,
and how slow a client is, follows from the seed, the client and the round: it is the same on every
runtime, and known before anybody trains, so clients whose replies would not count are not trained.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedhet.common.configured import Option, Refers
from fedhet.common.errors import ConfigError
from fedhet.common.files import expanded
from fedhet.common.kinds import NotNegative, Positive, Seed, Share, ShareAboveZero, Text
from fedhet.common.text_files import read_csv, read_json
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.samplers import most_clients
from fedhet.strategies.round.selection import (
    Outcome,
    RoundStart,
    Selection,
    Selector,
    drawn_by,
    selected,
)
from fedhet.strategies.slots import ClientSampler

_SLOWNESS, _DROPOUT, _PHASE, _MORE = 0x51, 0x52, 0x53, 0x54  # streams of the run's seed
_DAY = 86_400.0
_KEY = "system"
OverSelection = Annotated[float, Field(ge=1, le=1000)]
Sigma = Annotated[float, Field(ge=0, le=100)]  # beyond, times are infinite


class ClientSystem(Option):
    """How fast simulated clients are, and when they are there: here of one speed, always."""

    group = "system"
    searched: ClassVar[str] = "week"  # for clients, from some time on

    seconds_per_example: NotNegative = 0.001
    """seconds to train once on one example"""
    megabytes_per_second: Positive | None = None
    """speed of a client's connection; null: transfers take no time"""
    over_selection: OverSelection = 1.0
    """how many times as many clients are asked as a round needs; the first to answer count"""
    deadline_seconds: Positive | None = None
    """replies that take longer on the simulated clock do not count; null: wait for all"""
    dropout: Share = 0.0
    """probability that a client that is asked never answers"""
    seed: Annotated[Seed, Refers("${seed}")] = 0
    """seed of the run"""

    def available(self, clients: Sequence[int], clock: float) -> list[int]:
        """Return which of the clients are there at a time of the simulated clock, in order."""
        return list(clients)

    def until_available(self, clients: Sequence[int], clock: float, least: int) -> float:
        """Return the first of the :meth:`moments` from ``clock`` on with ``least`` clients.

        Raises:
            TimeoutError: if there is none.
        """
        for moment in self.moments(clock):
            if len(self.available(clients, moment)) >= least:
                return moment
        raise TimeoutError(
            f"fewer than {least} clients, which min_replies and participation need, are there in "
            f"the {self.searched} after the simulated second {clock:.0f}: change system, or set "
            "min_replies lower"
        )

    def moments(self, clock: float) -> Iterable[float]:
        """Return the times from ``clock`` on at which a round may begin: a week's minutes."""
        return (clock + 60.0 * minute for minute in range(7 * 24 * 60))

    def slowness(self, client: int) -> float:
        """Return s_i."""
        return 1.0

    def seconds(self, client: int, examples: int, num_bytes: int) -> float:
        """Return how long a client takes for so many examples and transferred bytes."""
        working = examples * self.seconds_per_example
        rate = self.megabytes_per_second
        moving = 0.0 if rate is None else num_bytes / (1e6 * rate)
        return self.slowness(client) * (working + moving)

    def asked(self, chosen: Sequence[int], present: Sequence[int], round: int) -> list[int]:
        """Return the sampled clients and, with over-selection, some more of those present."""
        # 50 * 1.1 is 55, up to rounding
        wanted = math.ceil(len(chosen) * self.over_selection - 1e-9)
        more = wanted - len(chosen)
        rest = np.setdiff1d(np.asarray(present), np.asarray(chosen), assume_unique=True)
        rng = np.random.default_rng([_MORE, self.seed, round])
        drawn = rng.choice(rest, size=min(more, len(rest)), replace=False)
        return sorted([*chosen, *drawn.tolist()])

    def play(self, round: int, seconds: Mapping[int, float], most: int) -> Outcome:
        """Return what becomes of the clients that are asked, by the seconds each would take."""
        dropped = [client for client in sorted(seconds) if self.drops_out(round, client)]
        order = sorted(seconds.keys() - set(dropped), key=lambda client: (seconds[client], client))
        deadline = math.inf if self.deadline_seconds is None else self.deadline_seconds
        in_time = [client for client in order if seconds[client] <= deadline][:most]
        late = sorted(set(order) - set(in_time))
        waits = len(in_time) < min(most, len(seconds)) and math.isfinite(deadline)
        taken = deadline if waits else max((seconds[one] for one in in_time), default=0.0)
        return Outcome(sorted(in_time), dropped, late, taken)

    def drops_out(self, round: int, client: int) -> bool:
        """Return whether a client never answers what it was asked in a round."""
        draw = np.random.default_rng([_DROPOUT, self.seed, round, client]).random()
        return bool(draw < self.dropout)


@dataclass(frozen=True)
class SystemClients(Selector):
    """Samples the clients of every round from those that a simulated system has there."""

    sampler: ClientSampler  # of those that are there
    system: ClientSystem  # slow, absent and vanishing clients
    options: LocalTrainingConfig | None  # of local training, which say how long it is
    least: int = 1  # so many clients a round waits for

    def select(self, start: RoundStart) -> Selection:
        """Return a round's clients and their messages."""
        system, present = self.system, start.availability.trainers
        clock = system.until_available(present, start.clock, self._needed(len(present)))
        present = system.available(present, clock)
        chosen = [present[i] for i in drawn_by(self.sampler, start.number, len(present))]
        asked = start.ask(system.asked(chosen, present, start.number))
        num_bytes = start.num_bytes
        work = {client: work_of(self.options, start.num_examples(client)) for client in asked}
        seconds = {client: system.seconds(client, n, num_bytes) for client, n in work.items()}
        return selected(start, system.play(start.number, seconds, len(chosen)), clock)

    def _needed(self, present: int) -> int:
        """Return of how many clients that are there the sampler may draw enough for a round."""
        most = partial(most_clients, self.sampler)
        return bisect_left(range(present), self.least, lo=min(self.least, present), key=most)


def work_of(options: LocalTrainingConfig | None, num_examples: int) -> int:
    """Return how many examples a client goes through, each as often as the recipe says."""
    if options is None or options.steps is None:
        return num_examples * (1 if options is None else options.epochs or 1)
    return options.steps * min(options.batch_size, num_examples)


class Constant(ClientSystem):
    """Clients of one speed, always there."""

    option = "constant"


class LogNormal(ClientSystem):
    """Clients whose slowness is log-normal: ln s_i ~ N(0, sigma^2), the same in all rounds."""

    option = "lognormal"

    sigma: Sigma = 1.0
    """standard deviation of ln(slowness); with 1.8 the slowest tenth takes at least 10 times as
    long as the median"""

    def slowness(self, client: int) -> float:
        """Return s_i."""
        draw = np.random.default_rng([_SLOWNESS, self.seed, client]).standard_normal()
        return math.exp(self.sigma * float(draw))


class DayNight(LogNormal):
    """Log-normal slowness, and every client is there for a part of its own day."""

    option = "day_night"

    share: ShareAboveZero = 0.4
    """share of the day for which a client is there"""
    spread: Share = 0.5
    """over how much of the day the clients' mornings spread; 0: all start at once"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._begins: NDArray[np.float64] = np.empty(0)  # of the clients, in parts of the day

    def available(self, clients: Sequence[int], clock: float) -> list[int]:
        """Return which of the clients are there."""
        ids = np.asarray(clients, dtype=np.int64)
        if len(ids) and int(ids.max()) >= len(self._begins):
            rng = np.random.default_rng([_PHASE, self.seed])
            size = 1 << int(ids.max()).bit_length()
            self._begins = self.spread * rng.random(size)
        since = (clock / _DAY - self._begins[ids]) % 1.0
        return [int(client) for client in ids[since < self.share]]


class Trace(ClientSystem):
    """Clients that are there, and as fast, as a file says.

    A CSV file with the columns ``client, start, end`` in simulated seconds, a line for each time
    that a client is there, and optionally ``slowness``; or FedScale's behaviour trace as JSON,
    {client: {"active": [...], "inactive": [...], "finish_time": ...}}. Both begin again after
    the last time; client i plays the (i modulo their number)-th of the trace's clients.
    """

    option = "trace"
    searched = "whole trace"

    path: Text
    """CSV with client,start,end[,slowness], or FedScale's trace as JSON"""

    def __init__(self, **given: Any) -> None:
        """Read the file."""
        super().__init__(**given)
        file = expanded(self.path, f"{_KEY}.path")
        read = _read_json if file.suffix == ".json" else _read_csv
        self._times, self._slowness = read(file)
        self._period = max(end for times in self._times for _, end in times)

    def available(self, clients: Sequence[int], clock: float) -> list[int]:
        """Return which of the clients are there."""
        now = clock % self._period
        there = [any(start <= now < end for start, end in times) for times in self._times]
        return [client for client in clients if there[client % len(there)]]

    def moments(self, clock: float) -> list[float]:
        """Return ``clock``, and when clients of the trace come until it has begun again.

        The clock's last bits may be lost, so a client is looked for a microsecond later, too.
        """
        starts = {start for times in self._times for start, _ in times}
        waits = sorted((start - clock) % self._period for start in starts)
        return [clock, *(clock + wait + more for wait in waits for more in (0.0, 1e-6))]

    def slowness(self, client: int) -> float:
        """Return s_i."""
        return self._slowness[client % len(self._slowness)]


Times = list[list[tuple[float, float]]]  # by client of a trace: from when to when it is there


def _read_csv(path: Path) -> tuple[Times, list[float]]:
    times: dict[str, list[tuple[float, float]]] = {}
    slowness: dict[str, float] = {}
    rows = read_csv(path, f"{_KEY}.path").fillna("").to_dict("records")
    for number, row in enumerate(rows, start=2):
        try:
            client, start, end = str(row["client"]), float(row["start"]), float(row["end"])
            slowness[client] = float(row.get("slowness") or 1.0)
        except (KeyError, ValueError):
            raise _broken(path, f"line {number} is {row}") from None
        if not (0.0 <= start < end < math.inf and 0.0 < slowness[client] < math.inf):
            raise _broken(path, f"line {number} is {row}")
        times.setdefault(client, []).append((start, end))
    if not times:
        raise _broken(path, "it has no line")
    return list(times.values()), [slowness[client] for client in times]


def _read_json(path: Path) -> tuple[Times, list[float]]:
    clients = read_json(path, f"{_KEY}.path")
    try:
        times = [_active(client) for client in clients.values()]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        raise _broken(path, "it is not of FedScale's form") from None
    if not any(times):
        raise _broken(path, "no client is ever there")
    return times, [1.0] * len(times)


def _active(client: Mapping[str, Sequence[float]]) -> list[tuple[float, float]]:
    """Return when a client of FedScale's trace is there: from "active" to "inactive" events."""
    starts, ends = sorted(map(float, client["active"])), sorted(map(float, client["inactive"]))
    finish = float(client["finish_time"])  # type: ignore[arg-type]
    pairs = [(start, next((e for e in ends if e > start), finish)) for start in starts]
    return [(start, end) for start, end in pairs if end > start]


def _broken(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{_KEY}.path={path}: {why}; a CSV file has the columns client, start, end (0 <= start < "
        "end, in seconds) and perhaps slowness (> 0), a JSON file "
        '{client: {"active": [...], "inactive": [...], "finish_time": ...}}'
    )
