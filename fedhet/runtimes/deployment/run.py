"""One run on a SuperLink that is up: submitted, followed over broken connections, brought home.

The run belongs to the SuperLink and not to this process: it goes on when the launcher ends, and
``resume=true`` with the same results directory follows it again. What comes back comes by the run's
log, rows and summary and recipe (common/run_events.py), unless the ServerApp writes to this
results directory itself. A model does not fit in a log: `runtime.fetch` brings the rest.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from common.files import last_lines
from common.results import read_rows
from common.run_events import TOKEN_FILE
from conf import quoted, resume_fingerprint
from fedhet.runtimes.deployment.connection import Connection, check_reachable, connection_of
from fedhet.runtimes.deployment.control_client import Control, RunStatus, Unreachable
from fedhet.runtimes.deployment.log_stream import LogStream
from fedhet.runtimes.deployment.run_record import Record, read_record
from fedhet.runtimes.deployment.story import write_config, write_rows, write_summary
from fedhet.runtimes.flower_install import LaunchError

MODEL = "model.safetensors"
_LAST_WORDS_SECONDS = 15.0  # of a completed run, which the SuperLink takes some seconds to end
_LOGGER = "+logger.run_log._target_=server_app.loggers.run_log.RunLog"


class DeploymentRun:
    """A run elsewhere; a context manager that leaves no process here, and the run where it is.

    Args:
        runtime: of the recipe.
        log_path: where the run's log goes; its folder is the results directory.

    Raises:
        LaunchError: if the recipe names no SuperLink.
    """

    def __init__(self, runtime: DictConfig, log_path: Path) -> None:
        self._runtime = runtime
        self._connection: Connection = connection_of(runtime)
        self._fetch = _fetch_command(runtime.fetch)
        self._log_path, self._folder = log_path, log_path.parent
        self._status = RunStatus("pending")
        self._record: Record | None = None
        self._log: LogStream | None = None
        self._broken_since: float | None = None

    def __enter__(self) -> DeploymentRun:
        """See that the SuperLink is there.

        Raises:
            LaunchError: if it is not.
        """
        check_reachable(self._connection)
        self._temporary = Path(tempfile.mkdtemp(prefix=f"fedhet-{os.getpid()}-"))
        self._control = Control(self._connection, self._temporary)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop following; and stop the run, where the recipe says that Ctrl-C does."""
        try:
            if self._log is not None:
                if kind is None:
                    self._log.wait(_LAST_WORDS_SECONDS)
                self._log.close()
            if self._record and kind is KeyboardInterrupt and self._runtime.stop_on_interrupt:
                self._control.stop(self._record.run_id)
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Submit the run, or find the one of this results directory that still goes on.

        Args:
            recipe: the composed recipe.
            overrides: what the apps compose it from.

        Raises:
            LaunchError: if there are too few SuperNodes, the SuperLink refuses the run, or the one
                that goes on has another recipe.
        """
        before = read_record(self._folder)
        if before is not None:
            _require_same(before, recipe)
            status = self._control.status(before.run_id)
            if status is None and before.address != self._connection.address:
                raise LaunchError(
                    f"this results_dir belongs to run {before.run_id} of the SuperLink at "
                    f"{before.address}; the one at {self._connection.address} does not know it"
                )
            if status is not None and not _is_to_be_resubmitted(status, before, recipe):
                self._follow(before)
                return
        self._require_nodes(int(recipe.clients))
        self._follow(self._start(recipe, overrides, before))

    def running(self) -> bool:
        """Take in what has come of the log, and return whether the run goes on.

        Raises:
            LaunchError: if the connection is broken for too long, or the results do not come.
        """
        if self._stream.read():
            self._broken_since = None
            self._copy()
        if self._stream.is_open() or not self._stream.may_reopen():
            return True
        try:
            status = self._control.status(self._run.run_id)
        except Unreachable as error:
            self._wait_for_connection(error)
            return True
        if status is None:
            raise LaunchError(
                f"the SuperLink at {self._connection.address} knows run {self._run.run_id} no "
                "more: was it started without --database?"
            )
        if status.is_over and self._stream.has_come_to_its_end():
            self._stream.read(to_the_end=True)
            self._status = status
            self._bring_home()
            return False
        self._stream.open()
        return True

    def failure(self) -> str:
        """Return why the run ended, as Flower has it."""
        words = f"{self._status.status} {self._status.details}".strip()
        tail = last_lines(self._log_path, 3)
        if "[Errno" in tail and str(self._folder) in tail and not self._runtime.server_results:
            tail += (
                "\nruntime.server_results is not set, so the server was to write to results_dir "
                "at the same path as here: set it to a folder that the server has"
            )
        return f"run {self._run.run_id}: {words}: {tail}"

    def interrupted(self) -> str:
        """Return what is left of the run when the launcher is stopped."""
        if self._record is None:
            return "stopped; nothing was submitted"
        if self._runtime.stop_on_interrupt:
            return f"stopped, and run {self._run.run_id} with it (runtime.stop_on_interrupt=true)"
        return f"stopped following; {self._how_to_follow()}"

    # ---- the beginning ---------------------------------------------------------------------------

    @property
    def _run(self) -> Record:
        assert self._record is not None
        return self._record

    @property
    def _stream(self) -> LogStream:
        assert self._log is not None
        return self._log

    def _require_nodes(self, clients: int) -> None:
        """Refuse what would only wait: the others of ``runtime.min_clients`` may come later."""
        online, least = self._control.online_nodes(), self._runtime.min_clients
        needed = clients if least is None else min(int(least), clients)
        if online < max(needed, 1):
            raise LaunchError(
                f"clients={clients}{'' if least is None else f' (runtime.min_clients={least})'}, "
                f"but {online} SuperNodes are connected to {self._connection.address}: start the "
                f"others, or set clients={online or 1}, or, where they may come later, "
                f"runtime.min_clients={online or 1}"
            )

    def _start(self, recipe: DictConfig, overrides: Sequence[str], before: Record | None) -> Record:
        token = before.token if before is not None else uuid.uuid4().hex
        record = Record(
            token=token,
            run_id=0,
            server_folder=before.server_folder if before else self._server_folder(recipe, token),
            address=self._connection.address,
            recipe=resume_fingerprint(recipe),
            rounds=int(recipe.rounds),
            log_begins=self._log_path.stat().st_size if self._log_path.exists() else 0,
        )
        record.write(self._folder)  # before the ServerApp looks for it
        words = [*overrides, f"results_dir={quoted(record.server_folder)}", _LOGGER]
        if before is not None and not self._has_rounds():  # it failed before its first
            words.append("resume=false")
        try:
            record = replace(record, run_id=self._control.start(words))
        except BaseException:
            if before is None:  # the folder is as it was, and may be named again
                (self._folder / TOKEN_FILE).unlink()
            raise
        record.write(self._folder)
        return record

    def _has_rounds(self) -> bool:
        path = self._folder / "metrics.jsonl"
        return path.exists() and any(row["round"] > 0 for row in read_rows(path))

    def _server_folder(self, recipe: DictConfig, token: str) -> str:
        """Return where the ServerApp is to write: a name of its own, which no other run has."""
        if not self._runtime.server_results:
            return str(self._folder)
        if recipe.resume:
            raise LaunchError(
                f"resume=true, but results_dir={self._folder} has no deployment.json: it is not of "
                "a run with runtime=deployment, and where that lies at the server is not known"
            )
        below = PurePosixPath(str(self._runtime.server_results))
        return str(below / f"{self._folder.name}-{token[:8]}")

    def _follow(self, record: Record) -> None:
        self._record = record
        self._log = LogStream(
            self._control,
            record.run_id,
            self._temporary / "log",
            self._log_path,
            record.log_begins,
        )
        self._stream.open()

    def _how_to_follow(self) -> str:
        run_id = self._run.run_id
        return (
            f"run {run_id} goes on. Follow it again: the same command with resume=true "
            f"results_dir={self._folder}. Stop it: flwr stop {run_id}"
        )

    # ---- on the way ------------------------------------------------------------------------------

    def _is_shared(self) -> bool:
        """Return whether the ServerApp writes to this results directory itself."""
        return self._stream.story.start.get("token") == self._run.token

    def _copy(self) -> None:
        story = self._stream.story
        if story.start and not self._is_shared():
            write_rows(self._folder / "metrics.jsonl", story.rows)

    def _wait_for_connection(self, error: Unreachable) -> None:
        now = time.monotonic()
        self._broken_since = self._broken_since or now
        if now - self._broken_since > float(self._runtime.reconnect_seconds):
            raise LaunchError(
                f"{error}; for {now - self._broken_since:.0f} s now (runtime.reconnect_seconds). "
                f"If it has not ended, {self._how_to_follow()}"
            )
        self._stream.postpone()

    # ---- the end ---------------------------------------------------------------------------------

    def _bring_home(self) -> None:
        """Have all results here; summary.json is the last of them, and new."""
        story, path = self._stream.story, self._folder / "summary.json"
        if self._is_shared():
            if path.exists():
                path.touch()  # a run that is followed again may have written it long ago
            return
        self._copy()
        if story.start:
            write_config(self._folder / "config.yaml", story.start["config"])
        summary: dict[str, Any] = dict(story.summary)
        if self._status.is_completed:
            if self._fetch:
                self._fetch_results(summary)
            else:
                summary["server_folder"] = self._run.server_folder
        if summary:
            write_summary(path, summary)

    def _fetch_results(self, summary: Mapping[str, Any]) -> None:
        places = {"{server}": self._run.server_folder, "{here}": str(self._folder)}
        command = [_filled_in(word, places) for word in self._fetch]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        again = "the run is completed; resume=true with this results_dir tries again"
        if done.returncode != 0:
            raise LaunchError(
                f"runtime.fetch has failed ({done.returncode}): {shlex.join(command)}: {said}; "
                f"{again}"
            )
        if not _is_the_model(self._folder / MODEL, str(summary.get("parameters_sha256"))):
            raise LaunchError(
                f"runtime.fetch ({shlex.join(command)}) has brought no {MODEL} to {self._folder} "
                f"with the parameters of this run; {again}"
            )


def _require_same(before: Record, recipe: DictConfig) -> None:
    if before.recipe != resume_fingerprint(recipe):
        raise LaunchError(
            f"this results_dir belongs to run {before.run_id}, which has another recipe: resume it "
            "with its own, or name another results_dir"
        )


def _is_to_be_resubmitted(status: RunStatus, before: Record, recipe: DictConfig) -> bool:
    """Return whether a run has ended and another one is to go on after it.

    Raises:
        LaunchError: if it still goes on, to another last round.
    """
    if status.is_completed:
        return int(recipe.rounds) != before.rounds
    if not status.is_over and int(recipe.rounds) != before.rounds:
        raise LaunchError(
            f"rounds={recipe.rounds}, but run {before.run_id} still goes on to rounds="
            f"{before.rounds}: follow it with that, or stop it first (flwr stop {before.run_id})"
        )
    return status.is_over


def _fetch_command(text: object) -> list[str]:
    """Return the words of runtime.fetch.

    Raises:
        LaunchError: if it does not say from where or to where.
    """
    words = shlex.split(str(text)) if text else []
    for place in ("{server}", "{here}"):
        if words and not any(place in word for word in words):
            raise LaunchError(
                f"runtime.fetch={text} lacks {place}: it is to copy the run's folder at the server "
                "({server}) to the results directory here ({here})"
            )
    return words


def _filled_in(word: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        word = word.replace(name, value)
    return word


def _is_the_model(path: Path, parameters_sha256: str) -> bool:
    """Return whether a model's file holds the parameters with this hash."""
    if not path.is_file():
        return False
    from safetensors.torch import load_file  # late: with it comes torch, seconds of it

    from strategies.round.tensor_files import parameters_sha256 as hash_of

    return hash_of(load_file(path)) == parameters_sha256
