"""A run's checkpoints; a thread writes them while the next round trains."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from fedhet.common.results import ResultsFolder
from fedhet.server_app.checkpoint import Checkpoint, RunOrigin, save_checkpoint
from fedhet.server_app.listeners import End, Finished, Listener
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.wire.records import to_tensors


class Checkpoints(Listener):
    """Writes a checkpoint every few rounds, and after the last one.

    Args:
        results: the results directory, whose rows a checkpoint names.
        strategy: whose state it holds.
        origin: what it belongs to.
        every: how many rounds; 0: only the last one.

    Attributes:
        folder: of the checkpoints.
        when_durable: called when a checkpoint is on the disk.
    """

    def __init__(
        self, results: ResultsFolder, strategy: FederatedStrategy, origin: RunOrigin, every: int
    ) -> None:
        self.folder, self.when_durable = results.folder / "checkpoints", list[Callable[[], None]]()
        self._results, self._strategy = results, strategy
        self._origin, self._every = origin, every
        self._thread = ThreadPoolExecutor(1)
        self._unfinished: Future[Mapping[int, int]] | None = None

    def on_round(self, finished: Finished) -> None:
        """Begin a checkpoint if one is due; the last one is on the disk before the run ends."""
        self.wait()
        round = finished.report.round
        due = finished.is_last or (self._every > 0 and round % self._every == 0)
        if round > 0 and due and finished.report.fatal is None:  # a resumed run does it again
            self._begin(finished)
            if finished.is_last:
                self.wait()

    def on_end(self, end: End) -> None:
        """Wait for the last checkpoint; a run that has failed has an error already."""
        with contextlib.suppress(OSError):
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint, if one was begun, is on the disk.

        Raises:
            OSError: if it cannot be written, as on a full disk.
        """
        unfinished, self._unfinished = self._unfinished, None
        if unfinished is not None:
            self._strategy.state.mark_durable(unfinished.result())
            for call in self.when_durable:
                call()

    def _begin(self, finished: Finished) -> None:
        state = self._strategy.snapshot()
        state.tensors = {  # copied: the next round may change them
            group: {name: value.clone() for name, value in values.items()}
            for group, values in state.tensors.items()
        }
        params, rows = to_tensors(finished.arrays), self._results.sha256
        checkpoint = Checkpoint(params, state, rows=rows, **vars(self._origin))

        def write() -> Mapping[int, int]:
            self._results.sync()  # the rows that it names first
            save_checkpoint(self.folder, checkpoint)
            return state.committed

        self._unfinished = self._thread.submit(write)
