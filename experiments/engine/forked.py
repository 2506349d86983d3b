"""Workers as forked processes on this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from logging import WARNING
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

from flwr.app import ArrayRecord
from flwr.common.logger import log

from experiments.engine.tasks import Answer, Lost, Place, Task
from experiments.engine.worker import ClientWorker
from experiments.processes import end_with_parent

_INLINE_BYTES = 1 << 16  # what fits a pipe in one piece


class ForkedWorkers:
    """Processes forked from this one, which share all that it has imported.

    Records and large answers pass through files in ``folder``, small things through pipes. Fork
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
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        first = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        for worker in range(count):
            pipe, process = self._start(worker, first)
            self._pipes.append(pipe)
            self._processes.append(process)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._processes)

    def place(self, record: ArrayRecord) -> Place:
        """Write a record to a file of its own."""
        path = self._folder / f"record-{self._placed}"
        self._placed += 1
        path.write_bytes(pickle.dumps(record, protocol=5))
        return str(path)

    def forget(self) -> None:
        """Remove all placed records and answers that nobody took."""
        for path in self._folder.iterdir():
            path.unlink()

    def send(self, worker: int, task: Task) -> None:
        """Give an idle worker a task."""
        # a worker that is gone is seen by wait()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._pipes[worker].send_bytes(pickle.dumps(task, protocol=5))

    def wait(self, timeout: float | None) -> Sequence[tuple[int, Answer | Lost]]:
        """Return the answers that are there; wait up to ``timeout`` seconds for the first."""
        ready = wait(self._pipes, timeout)
        workers = [worker for worker, pipe in enumerate(self._pipes) if pipe in ready]
        return [(worker, self._read(worker)) for worker in workers]

    def replace(self, worker: int, reason: str) -> bool:
        """End a worker and start another in its place."""
        log(WARNING, "worker %s is replaced: %s", worker, reason)
        self._end(worker)
        # not forked: by now this process may have threads of torch's, or a GPU
        pipe, process = self._start(worker, multiprocessing.get_context("spawn"))
        self._pipes[worker], self._processes[worker] = pipe, process
        return True

    def close(self) -> None:
        """End all workers."""
        for worker in range(len(self)):
            self._end(worker)

    def _start(self, worker: int, context: BaseContext) -> tuple[Connection, BaseProcess]:
        near, far = context.Pipe()
        gpu = self._gpus[worker % len(self._gpus)] if self._gpus else None
        # a forked child inherits the pipes' near ends, and closes them: else none would ever break
        inherited = [near, *self._pipes] if context.get_start_method() == "fork" else []
        process = context.Process(  # type: ignore[attr-defined]
            target=_work,
            args=(far, self._folder, gpu, inherited),
            name=f"worker-{worker}",
            daemon=True,
        )
        process.start()
        far.close()
        return near, process

    def _read(self, worker: int) -> Answer | Lost:
        try:
            data = self._pipes[worker].recv_bytes()
        except (EOFError, ConnectionResetError):
            self._processes[worker].join(timeout=1.0)
            code = self._processes[worker].exitcode
            reason = f"its worker process died (exit code {code})"
            self.replace(worker, reason)
            return Lost(reason)
        answer = pickle.loads(data)
        if isinstance(answer, Path):
            data = answer.read_bytes()
            answer.unlink()
            answer = pickle.loads(data)
        assert isinstance(answer, Answer)
        return answer

    def _end(self, worker: int) -> None:
        self._processes[worker].kill()
        self._processes[worker].join()
        self._pipes[worker].close()


def _work(pipe: Connection, folder: Path, gpu: str | None, inherited: Sequence[Connection]) -> None:
    """Answer tasks until the grid's end of the pipe is closed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    for connection in inherited:
        connection.close()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    worker = ClientWorker(_read_record)
    count = 0
    while True:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        data = pickle.dumps(worker.handle(task), protocol=5)
        if len(data) > _INLINE_BYTES:
            path = folder / f"answer-{os.getpid()}-{count}"
            path.write_bytes(data)
            data = pickle.dumps(path)
            count += 1
        pipe.send_bytes(data)


def _read_record(place: Place) -> ArrayRecord:
    record = pickle.loads(Path(str(place)).read_bytes())
    assert isinstance(record, ArrayRecord)
    return record
