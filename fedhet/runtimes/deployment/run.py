"""One run on a running SuperLink: submit it, follow it over broken connections, fetch results.

The run belongs to the SuperLink: it continues when the launcher ends, and ``resume=true`` with the
same results directory follows it again. If the ServerApp cannot write to that directory, recipe,
rows and summary come back as events in the run's log (common/run_events.py), and ``runtime.fetch``
fetches the model and the checkpoints.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf

from fedhet.common.errors import DamagedFileError
from fedhet.common.files import last_lines, save_text
from fedhet.common.results import CONFIG, METRICS, SUMMARY, write_rows, write_summary
from fedhet.common.run_events import RECORD_FILE
from fedhet.conf import fingerprint, quoted, resume_fingerprint
from fedhet.conf.project import travelling_code
from fedhet.runtimes.deployment.connection import check_reachable, connection_of
from fedhet.runtimes.deployment.control_client import Control, RunStatus, Unreachable
from fedhet.runtimes.deployment.log_stream import LogStream, update_rows
from fedhet.runtimes.deployment.run_record import RunRecord, read_record
from fedhet.runtimes.flower_install import LaunchError
from fedhet.runtimes.processes import signals_afterwards
from fedhet.runtimes.temporary_folder import temporary_folder

MODEL = "model.safetensors"
_END_SECONDS = 15.0  # the SuperLink takes some seconds to end a completed run
_LOGGER = "+logger.run_log._target_=fedhet.server_app.loggers.run_log.RunLog"


class DeploymentRun:
    """A run on another machine's SuperLink; the context manager leaves no process here.

    The folder of ``log_path`` is the results directory.
    """

    def __init__(self, runtime: DictConfig, log_path: Path) -> None:
        self._runtime = runtime
        self._connection = connection_of(runtime)
        self._fetch = _fetch_command(runtime.fetch)
        self._log_path, self._folder = log_path, log_path.parent
        self._status = RunStatus("pending")
        self._stack = contextlib.ExitStack()
        self._record: RunRecord | None = None
        self._log: LogStream | None = None
        self._broken_since: float | None = None
        self._stopped = False  # whether the launcher has stopped the run
        self._in_doubt = False  # whether it is unknown that the SuperLink has the run

    def __enter__(self) -> Self:
        """Check that the SuperLink can be reached."""
        check_reachable(self._connection)
        self._temporary = self._stack.enter_context(temporary_folder(Path(tempfile.gettempdir())))
        self._control = Control(self._connection, self._temporary)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Stop following; after Ctrl-C also stop the run, if the recipe says so."""
        try:
            if self._log is not None:
                if kind is None:
                    self._log.wait(_END_SECONDS)
                self._log.close()
            if self._record and kind is KeyboardInterrupt and self._runtime.stop_on_interrupt:
                self._control.stop(self._record.run_id)
                self._stopped = True
        finally:
            self._stack.close()

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Submit the run, or follow this results directory's run if it has not ended."""
        before = read_record(self._folder)
        if before is not None and self._may_follow(before, recipe):
            self._follow(before)
            return
        self._require_nodes(int(recipe.clients))
        self._follow(self._start(recipe, overrides, before))

    def running(self) -> bool:
        """Read the log and return whether the run goes on; fetch its results when it has ended."""
        record, log = self._followed()
        if log.read():
            self._broken_since = None
            self._copy_rows()
        if log.is_open() or not log.may_reopen():
            return True
        try:
            status = self._control.status(record.run_id)
        except Unreachable as error:
            self._wait_for_connection(error)
            return True
        if status is None:
            raise LaunchError(
                f"the SuperLink at {self._connection.address} no longer knows run {record.run_id}: "
                "was it started without --database?"
            )
        if status.is_over and log.is_complete():
            log.read(to_the_end=True)
            self._status = status
            self._collect_results()
            return False
        log.open()
        return True

    def failure(self) -> str:
        """Return why the run ended, in Flower's words."""
        status = self._status
        said = status.details or f"{status.status}: {last_lines(self._log_path, 3)}"
        unwritable = rf"results_dir={re.escape(str(self._folder))} (cannot be made|is not writable)"
        if re.search(unwritable, said) and not self._runtime.server_results:
            said += (
                "\nruntime.server_results is not set, so the server tried to write to the path of "
                "results_dir: set it to a folder of the server"
            )
        return f"run {self._followed()[0].run_id}: {said}"

    def continues(self) -> bool:
        """Return whether the run continues after the launcher was stopped."""
        return self._record is not None and not self._stopped

    def interrupted(self) -> str:
        """Say what remains of the run after the user has stopped the launcher."""
        if self._record is None:
            doubt = f"stopped. {self._doubt()}"
            return doubt if self._in_doubt else "stopped; nothing was submitted"
        if self._runtime.stop_on_interrupt:
            return f"stopped, and run {self._record.run_id} with it (runtime.stop_on_interrupt)"
        return f"stopped following; {self._how_to_follow()}"

    # ---- start -----------------------------------------------------------------------------------

    def _may_follow(self, before: RunRecord, recipe: DictConfig) -> bool:
        """Return whether to follow a run; False if it has ended, so that a new run resumes it."""
        if before.recipe != resume_fingerprint(recipe):
            raise LaunchError(
                f"this results_dir belongs to run {before.run_id}, which has another recipe: "
                "resume it with its own recipe, or name another results_dir"
            )
        status = self._control.status(before.run_id) if before.run_id else None
        changed = before.values != fingerprint(recipe)["recipe"]
        longer = changed or int(recipe.rounds) != before.rounds
        if status is None:
            if before.run_id and before.address != self._connection.address:
                raise LaunchError(
                    f"this results_dir belongs to run {before.run_id} of the SuperLink at "
                    f"{before.address}, which the one at {self._connection.address} does not know"
                )
            return False
        if longer and not status.is_over:
            other = "another target_accuracy, early_stopping or evaluation"
            if int(recipe.rounds) != before.rounds:
                other = f"rounds={before.rounds}"
            raise LaunchError(
                f"rounds={recipe.rounds}, but run {before.run_id} still runs with {other}: follow "
                "it with that, or stop it first: "
                f"{self._how_to_stop(before.run_id)}"
            )
        return not status.is_over or (status.is_completed and not longer)

    def _require_nodes(self, clients: int) -> None:
        """Reject a run if too few SuperNodes are connected."""
        online, least = self._control.online_nodes(), self._runtime.min_clients
        needed = clients if least is None else min(int(least), clients)
        if online < max(needed, 1):
            raise LaunchError(
                f"clients={clients}{'' if least is None else f' (runtime.min_clients={least})'}, "
                f"but {online} SuperNodes are connected to {self._connection.address}: start the "
                f"others, set clients={online or 1}, or, if they may join later, "
                f"runtime.min_clients={online or 1}"
            )

    def _start(
        self, recipe: DictConfig, overrides: Sequence[str], before: RunRecord | None
    ) -> RunRecord:
        token = before.token if before else uuid.uuid4().hex
        record = RunRecord(
            token=token,
            run_id=0,
            server_folder=before.server_folder if before else self._server_folder(recipe, token),
            address=self._connection.address,
            recipe=resume_fingerprint(recipe),
            rounds=int(recipe.rounds),
            values=fingerprint(recipe)["recipe"],
            log_begins=self._log_path.stat().st_size if self._log_path.exists() else 0,
        )
        record.write(self._folder)  # before the ServerApp looks for it
        self._in_doubt = True
        words = [*overrides, f"results_dir={quoted(record.server_folder)}", _LOGGER]
        if before:  # the last run may have ended before it wrote anything: the ServerApp looks
            below = str(PurePosixPath(record.server_folder).parent)
            words.append(f"runtime.server_results={quoted(below)}")
        with signals_afterwards(_say_that_it_waits):  # a run without its id cannot be stopped
            try:
                run_id = self._control.start(words, travelling_code(recipe))
            except Unreachable as error:
                raise LaunchError(f"{error}. {self._doubt()}") from None
            except Exception:  # nothing was submitted: leave the folder as it was
                self._in_doubt = False
                if before:
                    before.write(self._folder)
                else:
                    (self._folder / RECORD_FILE).unlink()
                raise
            self._record = replace(record, run_id=run_id)
            self._record.write(self._folder)
        return self._record

    def _doubt(self) -> str:
        """Say what to do about a submission that nobody has answered."""
        return (
            "The SuperLink may have the run; `flwr list` shows it. To submit it again, use the "
            f"same command with resume=true results_dir={self._folder}"
        )

    def _server_folder(self, recipe: DictConfig, token: str) -> str:
        """Return the folder that the ServerApp writes to: unique below runtime.server_results."""
        if not self._runtime.server_results:
            return str(self._folder)
        if recipe.resume:
            raise LaunchError(
                f"resume=true, but results_dir={self._folder} has no {RECORD_FILE}: it does not "
                "belong to a run with runtime=deployment"
            )
        below = PurePosixPath(str(self._runtime.server_results))
        return str(below / f"{self._folder.name}-{token[:8]}")

    def _follow(self, record: RunRecord) -> None:
        raw = self._temporary / "log"
        self._record = record
        self._log = LogStream(self._control, record.run_id, raw, self._log_path, record.log_begins)
        self._log.open()

    def _followed(self) -> tuple[RunRecord, LogStream]:
        assert self._record is not None
        assert self._log is not None
        return self._record, self._log

    def _how_to_follow(self) -> str:
        assert self._record is not None
        run_id = self._record.run_id
        return (
            f"run {run_id} continues. To follow it again, use the same command with resume=true "
            f"results_dir={self._folder}. To stop it: {self._how_to_stop(run_id)}"
        )

    def _how_to_stop(self, run_id: int) -> str:
        if name := self._runtime.connection:  # without the name flwr asks another SuperLink
            return f"flwr stop {run_id} {name}"
        return "follow it with runtime.stop_on_interrupt=true, and press Ctrl-C"

    # ---- on the way ------------------------------------------------------------------------------

    def _is_shared(self) -> bool:
        """Return whether the ServerApp writes to this results directory itself."""
        record, log = self._followed()
        return log.events.start.get("token") == record.token

    def _copy_rows(self) -> None:
        events = self._followed()[1].events
        if events.start and not self._is_shared():
            update_rows(self._folder / METRICS, events.rows)

    def _wait_for_connection(self, error: Unreachable) -> None:
        now = time.monotonic()
        self._broken_since = self._broken_since or now
        seconds = now - self._broken_since
        if seconds > float(self._runtime.reconnect_seconds):
            raise LaunchError(
                f"{error}, for {seconds:.0f} s now (runtime.reconnect_seconds). Unless it has "
                f"ended, {self._how_to_follow()}"
            )
        self._followed()[1].postpone()

    # ---- the end ---------------------------------------------------------------------------------

    def _collect_results(self) -> None:
        """Complete the results directory, and write a new summary.json last."""
        record, log = self._followed()
        if self._is_shared():
            path = self._folder / SUMMARY
            if path.exists() and self._status.is_completed:
                path.touch()  # it is old if the run was followed again
            return
        self._copy_rows()
        if log.events.start:
            config = OmegaConf.create(dict(log.events.start["config"]))
            save_text(self._folder / CONFIG, OmegaConf.to_yaml(config))
        summary: dict[str, Any] = dict(log.events.summary)
        if self._status.is_completed:
            if self._fetch:
                self._fetch_results(summary)
            else:
                summary["server_folder"] = record.server_folder
        if summary:
            write_rows(self._folder / METRICS, log.events.rows)  # a resumed run may have fewer rows
            write_summary(self._folder, summary)

    def _fetch_results(self, summary: Mapping[str, Any]) -> None:
        server, here = self._followed()[0].server_folder, str(self._folder)
        command = [w.replace("{server}", server).replace("{here}", here) for w in self._fetch]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
            )
        except OSError as error:
            done = subprocess.CompletedProcess(command, 127, "", str(error))  # a shell's code
        said = " ".join((done.stderr or done.stdout).split())[-500:]
        again = "the run is completed; resume=true with this results_dir tries again"
        if done.returncode != 0:
            raise LaunchError(
                f"runtime.fetch failed ({done.returncode}): {shlex.join(command)}: {said}; {again}"
            )
        if not _is_the_model(self._folder / MODEL, str(summary.get("parameters_sha256"))):
            raise LaunchError(
                f"runtime.fetch ({shlex.join(command)}) copied no {MODEL} with this run's "
                f"parameters to {self._folder}; {again}"
            )


def _say_that_it_waits() -> None:
    print("waiting for the submitted run's id; Ctrl-C again ends the wait", file=sys.stderr)


def _fetch_command(text: object) -> list[str]:
    """Return the words of runtime.fetch, which must contain {server} and {here}."""
    words = shlex.split(str(text)) if text else []
    for place in ("{server}", "{here}"):
        if words and not any(place in word for word in words):
            raise LaunchError(
                f"runtime.fetch={text} lacks {place}: it must copy the run's folder at the server "
                "({server}) to the results directory ({here})"
            )
    return words


def _is_the_model(path: Path, parameters_sha256: str) -> bool:
    """Return whether a model's file holds the parameters with this hash."""
    from fedhet.strategies.wire.tensor_files import (
        load_tensors,  # imports torch, which takes seconds
    )
    from fedhet.strategies.wire.tensor_files import parameters_sha256 as hash_of

    try:
        return hash_of(load_tensors(path)[0]) == parameters_sha256
    except DamagedFileError:
        return False
