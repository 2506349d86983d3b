"""Workers as forked processes on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import selectors
import signal
import sys
from collections.abc import Mapping, Sequence
from logging import WARNING
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.common.logger import log

from fedhet.common.errors import ConfigError
from fedhet.runtimes.local.protocol import Answer, Collect, Lost, Place, WorkerTask
from fedhet.runtimes.local.shared_memory import Channel, ReadableFiles, SharedSums, WritableFile
from fedhet.runtimes.local.worker import ClientWorker
from fedhet.runtimes.processes import end_with_parent, exit_text
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold

_LONGEST_SECONDS = 86_400.0  # one wait: a selector's timer overflows after 24 days


class ForkedWorkers:
    """Processes forked from this one, which share everything that it has imported.

    Records and large answers pass through shared memory, small messages through pipes. Fork the
    workers before this process uses torch on several threads or a GPU, because neither survives a
    fork. For the same reason a fresh interpreter replaces a dead worker, which takes seconds.

    Args:
        count: number of workers.
        folder: empty folder for the shared memory, best in /dev/shm; the caller removes it.
        gpus: values of CUDA_VISIBLE_DEVICES for the workers, in turn; empty leaves it unchanged.
    """

    def __init__(self, count: int, folder: Path, gpus: Sequence[str] = ()) -> None:
        self._folder, self._gpus = folder, tuple(gpus)
        self._placed = 0
        self._records: list[WritableFile] = []
        self._channels: list[Channel] = []
        self._processes: list[BaseProcess] = []
        first = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._selector = selectors.DefaultSelector()
        for worker in range(count):
            channel, process = self._start(worker, first)
            self._channels.append(channel)
            self._processes.append(process)

    def __len__(self) -> int:
        """Return the number of workers."""
        return len(self._processes)

    def place(self, record: ArrayRecord | FoldSettings) -> Place:
        """Write a record or the settings of a fold into memory that all workers map."""
        if self._placed == len(self._records):
            self._records.append(WritableFile(f"{self._folder}/record-{self._placed}"))
        file = self._records[self._placed]
        self._placed += 1
        return file.write(record)

    def forget(self) -> None:
        """Allow the next records to overwrite the present ones."""
        self._placed = 0

    def send(self, worker: int, tasks: Sequence[WorkerTask]) -> None:
        """Give a worker tasks."""
        with contextlib.suppress(OSError):  # wait() notices a dead worker
            self._channels[worker].send(tasks)

    def collect(self, workers: Sequence[int]) -> tuple[Sequence[ReplyFold], Mapping[int, Lost]]:
        """Return the folds of idle workers, and the workers that were lost."""
        for worker in workers:
            with contextlib.suppress(OSError):
                self._channels[worker].send(Collect())
        answers = {worker: self._read(worker) for worker in workers}
        lost = {worker: one for worker, one in answers.items() if isinstance(one, Lost)}
        return [one for one in answers.values() if isinstance(one, ReplyFold)], lost

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Sequence[Answer] | Lost]]:
        """Return the answers to at most one ``send`` per worker.

        Raises:
            ConfigError: if the shared memory has no room for a worker's answer.
        """
        seconds = None if timeout is None else min(timeout, _LONGEST_SECONDS)
        ready = [key.data for key, _ in self._selector.select(seconds)]
        answers = [(worker, self._read(worker)) for worker in ready]
        return [(worker, one) for worker, one in answers if not isinstance(one, ReplyFold)]

    def replace(self, worker: int, reason: str) -> bool:
        """End a worker at once and start another in its place."""
        log(WARNING, "worker %s is replaced: %s", worker, reason)
        self._end(worker)
        # spawned: by now this process may have torch's threads, or a GPU
        channel, process = self._start(worker, multiprocessing.get_context("spawn"))
        self._channels[worker], self._processes[worker] = channel, process
        return True

    def close(self) -> None:
        """End all workers."""
        for worker in range(len(self)):
            self._end(worker)
        self._selector.close()

    def _start(self, worker: int, context: BaseContext) -> tuple[Channel, BaseProcess]:
        near, far = context.Pipe()
        gpu = self._gpus[worker % len(self._gpus)] if self._gpus else None
        # A forked child inherits the pipes' near ends and must close them, or no pipe would break.
        inherited = [near, *self._channels] if context.get_start_method() == "fork" else []
        process = context.Process(  # type: ignore[attr-defined]
            target=_work,
            args=(far, f"{self._folder}/worker-{worker}", gpu, inherited),
            name=f"worker-{worker}",
            daemon=True,
        )
        process.start()
        far.close()
        self._selector.register(near, selectors.EVENT_READ, worker)
        return Channel(near, f"{self._folder}/task-{worker}"), process

    def _read(self, worker: int) -> Sequence[Answer] | ReplyFold | Lost:
        try:
            answer = self._channels[worker].receive()
        except (EOFError, OSError):
            self._processes[worker].join(timeout=1.0)
            reason = f"its worker process died: {exit_text(self._processes[worker].exitcode)}"
            self.replace(worker, reason)
            return Lost(reason)
        if isinstance(answer, ConfigError):
            raise answer
        assert isinstance(answer, list | ReplyFold)
        return answer

    def _end(self, worker: int) -> None:
        self._processes[worker].kill()
        self._processes[worker].join()
        self._selector.unregister(self._channels[worker])
        self._channels[worker].close()


def _let_server_finish() -> None:
    """Let the server keep its core when it gives this worker work."""
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _work(
    pipe: Connection, files: str, gpu: str | None, inherited: Sequence[Connection | Channel]
) -> None:
    """Carry out tasks until the grid closes its end of the pipe."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    _let_server_finish()
    for connection in inherited:
        connection.close()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    sums = SharedSums(f"{files}-sum")
    channel = Channel(pipe, f"{files}-answer", sums)
    worker = ClientWorker(ReadableFiles().read, sums)  # type: ignore[arg-type]
    while True:
        try:
            tasks = channel.receive()
        except EOFError:
            return
        assert isinstance(tasks, list | Collect)
        try:
            channel.send(worker.collect() if isinstance(tasks, Collect) else worker.handle(tasks))
        except ConfigError as error:  # the shared memory has no room for it
            channel.send(error)
