"""CPU time that the checks of incoming and stored data add to a round.

    FEDHET_DATA=... python -m benchmarks checks [--rounds 20] [--repeats 3]

Two recipes, by runtime=local: FedAvg on MNIST as in ``floor``, and the trivial one of ``start``;
both with a checkpoint a round, as by default. The server runs in this process and decodes the
replies itself, as it does with Flower. It counts the CPU time of its own thread, which other
programs on the machine do not add to:

    decode    all that the border does with a round's replies (border.py)
    plain     what has to be done in any case: the same replies' arrays as tensors, nothing checked
    border    decode - plain
    finite    the check that the new model has no NaN or Inf
    sums      the checksum of the round's checkpoint (that of a row takes microseconds)

A ratio is of border + finite, or sums, over the round's own CPU time: server and workers, all told.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from flwr.app import Message
from flwr.serverapp import Grid

from benchmarks import floor, start
from benchmarks.harness import options_of, save, spread
from fedhet.common import results
from fedhet.runtimes.local import run as local
from fedhet.strategies import federated
from fedhet.strategies.round import reply_fold, server_step
from fedhet.strategies.round.training_round import RoundReplies, TrainingRound, send_round
from fedhet.strategies.wire import tensor_files
from fedhet.strategies.wire.records import to_tensors

_WARM_UP = 2  # rounds


class Clock:
    """CPU seconds of this thread, by name of what they were spent on, since the last round."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()
        self.rounds: list[dict[str, float]] = []
        self._before = self._all()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose time counts as ``name``."""

        def timed(*args: Any, **words: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **words)
            finally:
                self.spent[name] += time.thread_time() - began

        return timed

    def end_round(self) -> None:
        """Take note of a round; "round" is the CPU time of this process and of its workers."""
        now = self._all()
        self.rounds.append({**self.spent, "round": now - self._before})
        self._before = now
        self.spent.clear()

    def _all(self) -> float:
        times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
        return time.process_time() + sum(one.user + one.system for one in times)


@contextmanager
def measured(clock: Clock) -> Iterator[None]:
    """Let a clock see the checks inside the block."""
    decode, append = reply_fold.decode, results.RowsFile.append
    plain = clock.timed("plain", _plain)

    def decode_both(message: Message, *args: Any, **words: Any) -> Any:
        plain(message)
        return clock.timed("decode", decode)(message, *args, **words)

    def append_row(self: Any, row: Any) -> None:
        append(self, row)
        if self.path.name == results.METRICS:
            clock.end_round()

    def send(grid: Grid, training: TrainingRound, check: Any, *, own: bool) -> RoundReplies:
        return send_round(grid, training, check, own=True)  # the server decodes every reply itself

    with (
        mock.patch.object(federated, "send_round", send),
        mock.patch.object(reply_fold, "decode", decode_both),
        mock.patch.object(results.RowsFile, "append", append_row),
        mock.patch.object(
            tensor_files, "add_checksum", clock.timed("sums", tensor_files.add_checksum)
        ),
        mock.patch.object(
            server_step, "_require_finite", clock.timed("finite", server_step._require_finite)
        ),
    ):
        yield


def _plain(message: Message) -> None:
    for record in message.content.array_records.values():
        to_tensors(record)


def rounds_of(words: list[str], rounds: int) -> list[dict[str, float]]:
    """Return what the rounds of a run have cost, without the first ones."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as scratch, measured(clock):
        folder = Path(scratch)
        (folder / "workers").mkdir()
        words = [*words, f"rounds={rounds}", "checkpoint.every=1", f"results_dir={folder / 'run'}"]
        local._run_server_app([*words, "runtime=local"], folder / "workers")
    return clock.rounds[1 + _WARM_UP :]


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__, "checks", repeats=3)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    trivial = [*start.RECIPE, "clients=100", "participation=0.1"]
    for name, recipe in (("mnist", floor.RECIPE), ("trivial", trivial)):
        runs = [partial(rounds_of, list(recipe), options.rounds) for _ in range(options.repeats)]
        rows = [row for run in runs for row in run()]
        for row in rows:  # done for the comparison alone
            row["round"] -= row["plain"]
        border = [row["decode"] - row["plain"] + row["finite"] for row in rows]
        parts = {"border": border, "sums": [row["sums"] for row in rows]}
        whole = statistics.median(row["round"] for row in rows)
        for part, seconds in parts.items():
            share = statistics.median(seconds) / whole
            milliseconds = spread([1000 * one for one in seconds])
            print(f"{name}, {part}: {milliseconds} ms of {1000 * whole:.0f} ms CPU, {share:.2%}")
        result[name] = {"rounds": rows, "round": whole, **parts}
    save(options.out, result)
