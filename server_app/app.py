"""The ServerApp: reads the recipe and runs it into a results directory."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from logging import WARNING
from pathlib import Path

from flwr.app import Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp
from omegaconf import DictConfig

from fedhet.common.errors import ConfigError
from fedhet.common.files import expanded, only_writer, remove_unfinished, writable_folder
from fedhet.common.flower.line import installed_release, untried
from fedhet.common.results import CONFIG, METRICS, SUMMARY, ResultsFolder, is_completed
from fedhet.conf import compose, method_name, overrides_of
from fedhet.server_app.assembly import check_parts, check_words
from fedhet.server_app.checkpoint import checkpoints, last_whole_checkpoint
from fedhet.server_app.columns import fitted_columns, stored_columns
from fedhet.server_app.parts import STATES
from fedhet.server_app.polling_grid import fast_polling
from fedhet.server_app.run import Run, log_write_errors, write_error
from fedhet.tasks import Functions

app = ServerApp()
# Seconds: a ServerApp that Flower has given up, as after a SuperLink that was down, notices late.
_PATIENCE = 60.0


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Compose the recipe of the run config, and run it."""
    run_recipe(compose(context.run_config), grid, overrides_of(context.run_config))


def run_recipe(
    recipe: DictConfig, grid: Grid, words: Sequence[str] = (), functions: Functions | None = None
) -> Path:
    """Check a recipe, run it, and return its results directory.

    Args:
        recipe: of the run.
        grid: Flower's connection to the nodes.
        words: the overrides that the recipe was composed of.
        functions: those of a task on own data, in place of those that the recipe names.
    """
    check_parts(recipe)
    check_words(recipe, words, functions)
    if warning := untried(installed_release()):
        log(WARNING, warning)
    folder = results_folder(recipe)
    with only_writer(folder, _PATIENCE), fast_polling(grid):
        _run_in(folder, recipe, grid, functions)
    return folder


def _run_in(folder: Path, recipe: DictConfig, grid: Grid, functions: Functions | None) -> None:
    last = last_checkpoint(recipe, folder)
    if recipe.resume:
        remove_unfinished(folder)
    try:
        columns = stored_columns(folder) if last else fitted_columns(recipe, grid, functions)
        run = Run(recipe, folder, last, functions, columns)
    except Exception as error:
        if not recipe.resume:  # a resumed run keeps the summary that is in the folder
            with log_write_errors(folder):
                write_error(ResultsFolder(folder), error)
        raise
    run.start(grid)


def results_folder(recipe: DictConfig) -> Path:
    """Make and return the results directory; by default a new one under ~/fedhet-results."""
    if recipe.results_dir:
        folder = expanded(recipe.results_dir, "results_dir")
        if not folder.is_absolute():
            raise ConfigError(
                f"results_dir={recipe.results_dir} must be absolute here: Flower starts the "
                "ServerApp in a directory of its own"
            )
        return writable_folder(folder)
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{stamp}_{method_name(recipe)}_{recipe.task.name}_seed{recipe.seed}"
    return writable_folder(Path.home() / "fedhet-results" / name)


def last_checkpoint(recipe: DictConfig, folder: Path) -> Path | None:
    """Return the checkpoint to resume from, None for a run from the beginning.

    A run that was killed before its first checkpoint begins again; so does a run whose launcher
    named a new folder for it (runtime.server_results). No other run is overwritten.

    Raises:
        ConfigError: if the folder has no run to resume, or has one and ``resume`` is false.
        DamagedFileError: if no checkpoint of the run can be used.
    """
    has_run = any((folder / name).exists() for name in (CONFIG, METRICS, SUMMARY))
    if not recipe.resume:
        metrics = folder / METRICS
        begun = metrics.exists() and metrics.stat().st_size > 0
        if begun or checkpoints(folder / "checkpoints"):
            raise ConfigError(
                f"results_dir={folder} holds a run already; set resume=true to continue it, or "
                "another results_dir"
            )
        return None
    if found := last_whole_checkpoint(folder):
        return found
    if not has_run:
        if recipe.resume == "auto" or recipe.runtime.get("server_results"):
            log(WARNING, "%s holds no run yet: it begins with round 1", folder)
            return None
        raise ConfigError(
            f"resume=true, but results_dir={folder} holds no checkpoint and no run that was cut "
            "short; set resume=false to start afresh, and name another folder if it is not empty"
        )
    if is_completed(folder):
        raise ConfigError(
            f"resume=true, but results_dir={folder} holds no checkpoint of its run, which is "
            "completed; name another results_dir"
        )
    log(WARNING, "%s holds no checkpoint: its run begins again with round 1", folder)
    shutil.rmtree(folder / STATES, ignore_errors=True)  # no other run can use them
    return None
