"""Workers as forked processes on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import selectors
import signal
import sys
from collections.abc import Sequence
from functools import partial
from logging import WARNING
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.common.logger import log

from fedhet.runtimes.local.protocol import Answer, Lost, Place, Task
from fedhet.runtimes.local.shared_memory import Channel, ReadableFiles, WritableFile, Written
from fedhet.runtimes.local.worker import ClientWorker
from fedhet.runtimes.processes import end_with_parent


class ForkedWorkers:
    """Processes forked from this one, which share all that it has imported.

    Records and large answers pass through memory that all map, small things through pipes. Fork
    them before this process uses torch on several threads or a GPU: neither survives a fork. That
    is why a worker that died is followed by a fresh interpreter, which takes some seconds.

    Args:
        count: how many.
        folder: in memory, best (/dev/shm); empty, and the caller's to remove.
        gpus: what CUDA_VISIBLE_DEVICES is to be for each, in turn; empty leaves it as it is.
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
        """Return how many there are."""
        return len(self._processes)

    def place(self, record: ArrayRecord) -> Place:
        """Write a record into memory that all workers map."""
        if self._placed == len(self._records):
            self._records.append(WritableFile(f"{self._folder}/record-{self._placed}"))
        file = self._records[self._placed]
        self._placed += 1
        return file.write(pickle.dumps(record, protocol=5))

    def forget(self) -> None:
        """Let the next records be written over those of now."""
        self._placed = 0

    def send(self, worker: int, task: Task) -> None:
        """Give a worker a task."""
        with contextlib.suppress(OSError):  # a worker that is gone is seen by wait()
            self._channels[worker].send(task)

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Answer | Lost]]:
        """Return at most one answer a worker; wait up to ``timeout`` seconds for the first."""
        ready = [key.data for key, _ in self._selector.select(timeout)]
        return [(worker, self._read(worker)) for worker in ready]

    def replace(self, worker: int, reason: str) -> bool:
        """End a worker and start another in its place."""
        log(WARNING, "worker %s is replaced: %s", worker, reason)
        self._end(worker)
        # not forked: by now this process may have threads of torch's, or a GPU
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
        # a forked child inherits the pipes' near ends, and closes them: else none would ever break
        inherited = [near, *self._channels] if context.get_start_method() == "fork" else []
        process = context.Process(  # type: ignore[attr-defined]
            target=_work,
            args=(far, f"{self._folder}/answer-{worker}", gpu, inherited),
            name=f"worker-{worker}",
            daemon=True,
        )
        process.start()
        far.close()
        self._selector.register(near, selectors.EVENT_READ, worker)
        return Channel(near, f"{self._folder}/task-{worker}"), process

    def _read(self, worker: int) -> Answer | Lost:
        try:
            answer = self._channels[worker].receive()
        except (EOFError, OSError):  # at the end of an answer, or in the midst of one
            self._processes[worker].join(timeout=1.0)
            code = self._processes[worker].exitcode
            reason = f"its worker process died (exit code {code})"
            self.replace(worker, reason)
            return Lost(reason)
        assert isinstance(answer, Answer)
        return answer

    def _end(self, worker: int) -> None:
        self._processes[worker].kill()
        self._processes[worker].join()
        self._selector.unregister(self._channels[worker])
        self._channels[worker].close()


def _work(
    pipe: Connection, answers: str, gpu: str | None, inherited: Sequence[Connection | Channel]
) -> None:
    """Answer tasks until the grid's end of the pipe is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    for connection in inherited:
        connection.close()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    channel, placed = Channel(pipe, answers), ReadableFiles()
    worker = ClientWorker(partial(_read_record, placed))
    while True:
        try:
            task = channel.receive()
        except EOFError:
            return
        assert isinstance(task, Task)
        channel.send(worker.handle(task))


def _read_record(placed: ReadableFiles, place: Place) -> ArrayRecord:
    assert isinstance(place, Written)
    record = placed.read(place)
    assert isinstance(record, ArrayRecord)
    return record
