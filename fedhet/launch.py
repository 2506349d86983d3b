"""`fedhet key=value ...` runs any recipe; with -m it runs a sweep of several.

The command composes the recipe with Hydra, checks it before it starts a process or makes a folder,
and hands the same words to the runtime. It shows the rounds as they end and draws the plot. Exit
codes: 0 if the run completed, 1 if it failed or diverged, 130 for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text
from yaml import YAMLError

from fedhet import signals
from fedhet.commands import reported_errors
from fedhet.common.errors import ConfigError
from fedhet.common.files import LOCK, expanded, only_writer, writable_folder
from fedhet.common.imports import quick_imports
from fedhet.common.results import (
    COMPLETED,
    CONFIG,
    FAILED,
    LOG,
    METRICS,
    STOPPED,
    SUMMARY,
    ResultsFollower,
    is_completed,
    read_rows,
    read_summary,
    warnings_of,
    write_end,
)
from fedhet.conf import (
    compose_overrides,
    explain_words,
    fingerprint,
    identity,
    method_name,
    quoted,
    with_open_keys,
    words_of,
)
from fedhet.conf.check import checked
from fedhet.conf.mistakes import NO_OPTION
from fedhet.conf.project import register_recipes
from fedhet.conf.relations import without_effect
from fedhet.help import check_flags, print_help
from fedhet.natural_clients import with_natural_clients
from fedhet.plot import can_plot, plot_run, warm_up
from fedhet.progress import Display, closing_panel, round_display
from fedhet.runtimes.flower_install import LaunchError, check_flower
from fedhet.runtimes.local.early_server import EarlyServer
from fedhet.runtimes.local.run import libraries_of
from fedhet.runtimes.resources import check_machine
from fedhet.runtimes.run_config import app_overrides
from fedhet.runtimes.runtime import Runtime, runtime_for
from fedhet.sweep import fork_launcher, session
from fedhet.sweep.job import run_job
from fedhet.sweep.method_keys import with_single_sweeps
from fedhet.sweep.optuna_search import set_defaults
from fedhet.sweep.resume import key_of, take_resume

_POLL_SECONDS = 0.02
_LOCK = ".launcher.lock"
_ROWS_OF_START = 2  # rounds 0 and 1: a run's warnings are shown before them, and later counted
_LAST_MOMENTS = 5.0  # seconds that a run may take to end after it was stopped
_early: EarlyServer | None = None  # global, because Hydra passes on only the recipe
_ENDED = {"failed": "failed", "diverged": "diverged", "stopped": "was stopped"}  # by status
_STARTS = {  # what a runtime does first; the others first import PyTorch
    "flower": "starting Flower's SuperLink",
    "deployment": "connecting to the SuperLink",
}
_FOLLOWS = "submitted; waiting for the server's rounds"  # a launcher of runtime=deployment
_WITH_CODE = ("local", "ray")  # runtimes that import torch in this process
_OF_CODE = (
    *("strategy.", "strategy/", "strategy=[", "schedule.", "logger.", "local.optimizers."),
    *("task.channels", "task.classes", "task.mean", "task.num_classes", "task.source", "task.std"),
)


def main(early: EarlyServer | None = None) -> None:
    """Run the console command `fedhet`; ``early`` can serve a local run."""
    global _early
    _early = early
    signals.handle_in_launcher()
    with reported_errors("fedhet"), signals.signals_first():
        if {"-h", "--help"} & set(sys.argv[1:]):
            print_help(sys.argv[1:])
            return
        if "--version" in sys.argv[1:]:
            print(*(f"{name} {version(name)}" for name in ("fedhet", "flwr", "torch")), sep=", ")
            return
        words = with_open_keys(sys.argv[1:])
        sys.argv[1:] = take_resume(with_single_sweeps(words))
        check_flags(sys.argv[1:])
        set_defaults()
        fork_launcher.register()
        register_recipes()
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
        try:
            _hydra_main()
        except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
            known = isinstance(error, OmegaConfBaseException) or str(error).startswith(NO_OPTION)
            if isinstance(error, ValueError) and not known:
                raise  # a bug of ours
            raise explain_words(error, sys.argv[1:]) from None
        finally:
            all_completed = session.close()
    sys.exit(0 if all_completed else 1)


@hydra.main(version_base="1.3", config_path="pkg://fedhet.conf", config_name="config")
def _hydra_main(recipe: DictConfig) -> float | None:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return run_job(recipe, run)
    with reported_errors("fedhet"):
        run(recipe)
    return None


def run(recipe: DictConfig) -> None:
    """Run one recipe from start to end; a LaunchError says why it did not complete."""
    words = words_of(HydraConfig.get().overrides.task)
    console = Console()
    if recipe.resume == "auto":
        words = _continue_or_begin(recipe, words)
        if recipe.resume and _is_done(recipe, words, console):
            if _early is not None:
                _early.dismiss()
            return
    if HydraConfig.get().mode == RunMode.RUN:  # a sweep's other jobs may read the key
        for line in without_effect(words, recipe):
            Console(stderr=True).print(f"fedhet: {line}", style="yellow", soft_wrap=True)
    with_code = recipe.runtime.name in _WITH_CODE
    with signals.signals_first():
        signals.end_if_signalled()
        with console.status("importing PyTorch") if with_code else nullcontext():
            words = with_natural_clients(recipe, words)
            early = check_run(recipe, words, _early if with_code else None)
        if _early is not None and early is None:
            _early.dismiss()
        results_dir = _prepare_results_dir(recipe)
        with _only_launcher(results_dir, resuming=bool(recipe.resume)):
            _run_in(results_dir, recipe, words, early, console)


def _continue_or_begin(recipe: DictConfig, words: Sequence[str]) -> list[str]:
    """Set the recipe's ``resume`` by what its folder holds; return the words with that value."""
    if not recipe.results_dir:
        raise ConfigError("resume=auto needs a folder for the run: results_dir=...")
    folder = expanded(str(recipe.results_dir), "results_dir")
    recipe.resume = folder.is_dir() and bool(_content_of(folder))
    kept = [word for word in words if key_of(word) != "resume"]
    return [*kept, f"resume={str(recipe.resume).lower()}"]


def _is_done(recipe: DictConfig, words: Sequence[str], console: Console) -> bool:
    """Return whether the folder holds this run, completed; show it if it does."""
    folder = expanded(str(recipe.results_dir), "results_dir").absolute()
    if not is_completed(folder):
        return False
    summary = read_summary(folder)
    asked = fingerprint(compose_overrides(tuple(app_overrides(words, recipe, folder))))["recipe"]
    if summary.get("fingerprint", {}).get("recipe") != asked:
        return False
    title = f"{method_name(recipe)} on {recipe.task.name}"
    results = ResultsFollower(folder)
    _close(console, results, summary, _draw(results, title))
    return True


def _run_in(
    results_dir: Path,
    recipe: DictConfig,
    words: Sequence[str],
    early: EarlyServer | None,
    console: Console,
) -> None:
    with_code = recipe.runtime.name in _WITH_CODE
    overrides = app_overrides(words, recipe, results_dir)
    results = ResultsFollower(results_dir)
    title = f"{method_name(recipe)} on {recipe.task.name}"
    runtime = runtime_for(recipe, results_dir / LOG, early)
    before = _written(results_dir)

    def end(status: str, reason: str) -> None:
        if not recipe.resume or _written(results_dir) != before:  # not a run that refused to resume
            write_end(results_dir, identity(recipe), status, reason)

    try:
        with round_display(console, title, recipe.rounds) as display:
            if not with_code:
                display.stage(_STARTS[recipe.runtime.name])
            with runtime:
                runtime.submit(recipe, overrides)
                display.stage(_FOLLOWS if recipe.runtime.name == "deployment" else _loads(recipe))
                if early is None:
                    warm_up()  # one core is idle meanwhile
                summary = _watch(runtime, results, display, end)
                if summary["status"] != FAILED:
                    plot = _draw(results, title)  # while the server's process ends
    except (KeyboardInterrupt, SystemExit) as signalled:
        if not runtime.continues() and _has_begun(results_dir):
            end(STOPPED, "stopped by Ctrl-C or SIGTERM")  # unless the run has said so itself
            if (results_dir / SUMMARY).exists():
                _close(console, results, read_summary(results_dir), _draw(results, title))
        if isinstance(signalled, KeyboardInterrupt):
            raise KeyboardInterrupt(runtime.interrupted()) from None
        raise
    status, reason = summary["status"], summary.get("error")
    if status != FAILED:
        _close(console, results, summary, plot)
    if status != COMPLETED:
        log = results_dir / LOG
        raise LaunchError(f"the run {_ENDED[status]}: {reason}\nits log: {log}", status)


def _loads(recipe: DictConfig) -> str:
    """Say what a run that has begun does before its first line."""
    libraries = " and ".join(libraries_of(recipe)) or "libraries"
    return f"loading {libraries} and data, starting workers"


def _close(
    console: Console, results: ResultsFollower, summary: Mapping[str, Any], plot: str
) -> None:
    """Show what a run has measured, and where it and its plot are."""
    folder = results.folder
    console.print(closing_panel(summary))
    lines = [f"table    {line}" for line in summary.get("table", ())]
    lines += [f"results  {folder}", f"plot     {plot}"]
    if server_folder := summary.get("server_folder"):
        lines.append(f"model    {server_folder} at the server (runtime.fetch copies it)")
    if count := len({*warnings_of(folder)}):
        lines.append(f"log      {folder / LOG}, with {count} warning{'s' * (count > 1)}")
    if summary["status"] == STOPPED and HydraConfig.get().mode == RunMode.RUN:
        lines.append(f"continue {_resuming(sys.argv[1:], folder)}")
    console.print(Text("\n".join(lines)), soft_wrap=True)


def _resuming(words: Sequence[str], folder: Path) -> str:
    """Return the command that continues a stopped run."""
    kept = [word for word in words if key_of(word) not in ("results_dir", "resume")]
    plain = re.fullmatch(r"[\w./+-]+", str(folder))
    where = f"results_dir={folder if plain else quoted(str(folder))}"
    return shlex.join(["fedhet", *kept, where, "resume=true"])


def _written(folder: Path) -> list[int]:
    """Return when a run last wrote its recipe and its rows."""
    paths = [folder / name for name in (CONFIG, METRICS)]
    return [path.stat().st_mtime_ns for path in paths if path.exists()]


def _has_begun(folder: Path) -> bool:
    """Return whether a run has written anything, so that there is something to resume."""
    return any((folder / name).exists() for name in (CONFIG, METRICS))


def check_run(
    recipe: DictConfig, words: Sequence[str], early: EarlyServer | None = None
) -> EarlyServer | None:
    """Reject a recipe that cannot run on this machine; ``words`` are its overrides.

    Constructors check their arguments here only if a word sets one or the runtime needs their
    modules anyway, because importing them takes seconds. Return the early server, if it can serve
    the run.
    """
    checked(recipe, words)
    check_machine(recipe)
    with_code = recipe.runtime.name in _WITH_CODE
    if not with_code:
        check_flower()
    if early is not None:
        early.begin_check(recipe)
        fingerprint(compose_overrides(tuple(words)))  # computed while the server imports
        with quick_imports():
            warm_up()
        if early.end_check():
            return early
    if with_code or any(word.lstrip("+~").startswith(_OF_CODE) for word in words):
        with quick_imports():
            from fedhet.server_app.assembly import check_parts

        check_parts(recipe)
    return None


def _watch(
    runtime: Runtime,
    results: ResultsFollower,
    display: Display,
    end: Callable[[str, str], None],
) -> Mapping[str, Any]:
    """Show a run's rounds until it ends, and what it warns of before round 1; return its summary.

    For a run that could not write its summary itself, ``end`` writes it from a status and a reason.
    """
    begun = (results.folder / CONFIG).exists()  # if the run is resumed
    rows = 0
    while True:
        signals.end_if_signalled()
        running = runtime.running()
        summary = results.summary()
        for row in results.new_rows():  # read after the summary, so that the last round is there
            begun, rows = True, rows + 1
            if rows <= _ROWS_OF_START:
                for text in results.new_warnings():
                    display.warn(text)
            display.row(row)
        if not begun and (results.folder / CONFIG).exists():
            begun = True
            display.stage("checking the clients, then round 1")
        # A run writes its summary last. Flower and Ray then take some three seconds to shut down;
        # leaving the runtime ends them at once.
        if summary.get("status") == COMPLETED or (summary and not running):
            return summary
        if not running:
            reason = runtime.failure()
            end(FAILED, reason)
            return {"status": FAILED, "error": reason}
        time.sleep(_POLL_SECONDS)


def _prepare_results_dir(recipe: DictConfig) -> Path:
    """Create the run's own results directory and return its absolute path."""
    if not recipe.results_dir:
        if recipe.resume:
            raise ConfigError("resume=true needs the folder of the run: results_dir=...")
        return _new_results_dir(recipe)
    folder = expanded(str(recipe.results_dir), "results_dir").absolute()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"results_dir={folder} is a file; name a folder")
    content = _content_of(folder)
    if not recipe.resume and content:
        raise _not_empty(folder)
    # A deployment's ServerApp may have the run on another machine.
    if recipe.resume and recipe.runtime.simulation and not content:
        raise ConfigError(
            f"resume=true, but results_dir={folder} holds no run: leave out resume to begin one, "
            "or name the folder of a run"
        )
    return writable_folder(folder)


@contextmanager
def _only_launcher(folder: Path, *, resuming: bool) -> Iterator[None]:
    """Reserve a results directory for this launcher; another may have just begun in it.

    The server has its own lock, because it may continue, or be started, without a launcher.
    """
    with only_writer(folder, _LAST_MOMENTS, _LOCK):
        if not resuming and _content_of(folder):
            raise _not_empty(folder)
        yield


def _content_of(folder: Path) -> list[Path]:
    # A job of a sweep has its log before it starts; a run that was killed early has left its lock.
    return [path for path in folder.glob("*") if path.name not in (LOG, LOCK, _LOCK)]


def _not_empty(folder: Path) -> ConfigError:
    or_else = ", or continue the run in it with resume=true" if _has_begun(folder) else ""
    return ConfigError(f"results_dir={folder} is not empty: name another folder{or_else}")


def _new_results_dir(recipe: DictConfig) -> Path:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{stamp}_{method_name(recipe)}_{recipe.task.name}_seed{recipe.seed}"
    folder, number = writable_folder(Path.cwd() / "results") / name, 1
    while True:
        try:
            folder.mkdir()
        except FileExistsError:  # the same recipe was started in the same second
            number += 1
            folder = folder.with_name(f"{name}_{number}")
        else:
            return folder


def _draw(results: ResultsFollower, title: str) -> str:
    if not can_plot():
        return 'not drawn: matplotlib is missing; install it with pip install -e ".[plots]"'
    if not results.metrics_path.exists():
        return "not drawn: no round has ended"
    path = results.folder / "plot.png"
    try:
        plot_run(read_rows(results.metrics_path), title, path)
    except (OSError, RuntimeError, ValueError) as error:  # the run is complete without a plot
        return f"not drawn: {error}"
    return str(path)


if __name__ == "__main__":
    main()
