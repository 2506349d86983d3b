"""`fedhet key=value ...`: one run of any recipe, or with -m a sweep of many.

The command composes the recipe with Hydra, so that a wrong key or option is refused at once, and
hands the same words to `flwr run`. It shows the rounds as they end, draws the plot, and ends with 0
only if the run completed: 1 for a failed one, 130 for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.text import Text

from common.results import ResultsFollower, read_rows
from conf import method_name
from fedhet.plot import can_plot, plot_run
from fedhet.progress import Display, closing_panel, display_for
from fedhet.runtimes.flower_install import LaunchError
from fedhet.runtimes.processes import NOTHING_LEFT
from fedhet.runtimes.resources import check_sizes
from fedhet.runtimes.run_config import app_overrides
from fedhet.runtimes.runtime import Runtime, runtime_for
from fedhet.sweep import session
from fedhet.sweep.arguments import take_resume
from fedhet.sweep.job import run_job
from fedhet.sweep.optuna_search import set_defaults
from fedhet.sweep.sweep_folder import SweepRefused

_POLL_SECONDS = 0.1
_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """Run the console command `fedhet`."""
    _answer_signals()
    try:
        sys.argv[1:] = take_resume(sys.argv[1:])
        set_defaults()
        try:
            _hydra_main()
        finally:
            all_completed = session.close()
        sys.exit(0 if all_completed else 1)
    except KeyboardInterrupt as interrupt:
        _complain(str(interrupt) or NOTHING_LEFT)
        sys.exit(_INTERRUPTED)
    except SweepRefused as error:
        _complain(str(error))
        sys.exit(1)


@hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")
def _hydra_main(recipe: DictConfig) -> float | None:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return run_job(recipe, run)
    try:
        run(recipe)
    except (LaunchError, ValueError) as error:
        _complain(str(error))
        sys.exit(1)
    return None


def run(recipe: DictConfig) -> None:
    """Run one recipe from start to end.

    Args:
        recipe: the composed recipe.

    Raises:
        LaunchError: if the run could not be started or failed; the message has the reason.
        ValueError: if the recipe cannot be simulated.
    """
    check_sizes(recipe)
    results_dir = prepare_results_dir(recipe)
    overrides = app_overrides(HydraConfig.get().overrides.task, recipe, results_dir)
    results = ResultsFollower(results_dir)
    console = Console()
    title = f"{method_name(recipe)} on {recipe.task.name}"
    with (
        runtime_for(recipe, results_dir / "log.txt") as runtime,
        display_for(console, title, recipe.rounds) as display,
    ):
        try:
            runtime.submit(recipe, overrides)
            summary = _watch(runtime, results, display)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(runtime.interrupted()) from None
    console.print(closing_panel(summary))
    where = f"results  {results_dir}\nplot     {_draw(results, title)}"
    if elsewhere := summary.get("server_folder"):
        where += f"\nmodel    {elsewhere} at the server (runtime.fetch brings it)"
    console.print(Text(where), soft_wrap=True)


def _watch(runtime: Runtime, results: ResultsFollower, display: Display) -> Mapping[str, Any]:
    """Show a run's rounds until it ends, and return its summary."""
    while True:
        going = runtime.running()
        summary = results.summary()
        for row in results.new_rows():  # after the summary, so that the last round is among them
            display.show(row)
        # The summary is the last thing that a run writes, its loggers' ends included. Flower and
        # Ray then take some three seconds to shut down, and are ended instead.
        if summary.get("status") == "completed":
            return summary
        if not going:
            reason = summary.get("error") or runtime.failure()
            log = results.metrics_path.with_name("log.txt")
            raise LaunchError(f"the run failed: {reason}\nits log: {log}")
        time.sleep(_POLL_SECONDS)


def prepare_results_dir(recipe: DictConfig) -> Path:
    """Return the run's results directory, absolute and made.

    Raises:
        LaunchError: if a fresh run would write among another's results, or a resumed one has none.
    """
    if recipe.results_dir:
        folder = Path(str(recipe.results_dir)).expanduser().absolute()
    elif recipe.resume:
        raise LaunchError("resume=true needs the folder of the run to go on with: results_dir=...")
    else:
        return _new_results_dir(recipe)
    if folder.exists() and not folder.is_dir():
        raise LaunchError(f"results_dir={folder} is a file; name a folder")
    # A sweep begins a job's log before the job; and a log alone is no run.
    others = [path for path in folder.glob("*") if path.name != "log.txt"]
    if not recipe.resume and others:
        raise LaunchError(
            f"results_dir={folder} is not empty: name another, or go on with the run in it by "
            "resume=true"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _new_results_dir(recipe: DictConfig) -> Path:
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{stamp}_{method_name(recipe)}_{recipe.task.name}_seed{recipe.seed}"
    for suffix in ("", *(f"_{number}" for number in range(2, 100))):
        folder = Path.cwd() / "results" / f"{name}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:  # the same recipe, started in the same second
            continue
        return folder
    raise LaunchError(f"results/{name} and a hundred like it exist; name one: results_dir=...")


def _draw(results: ResultsFollower, title: str) -> str:
    if not can_plot():
        return 'not drawn: matplotlib is missing; `pip install -e ".[plots]"` brings it'
    path = results.metrics_path.with_name("plot.png")
    plot_run(read_rows(results.metrics_path), title, path)
    return str(path)


def _complain(message: str) -> None:
    Console(stderr=True).print(Text(f"fedhet: {message}", style="bold red"), soft_wrap=True)


def _answer_signals() -> None:
    signal.signal(signal.SIGINT, _end_by_signal)  # a shell's background jobs ignore it
    signal.signal(signal.SIGTERM, _end_by_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, _end_by_signal)


def _end_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    session.stop()
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


if __name__ == "__main__":
    main()
