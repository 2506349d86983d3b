"""Runs and partitions for a notebook or a script: the words of `fedhet`, results as tables."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedhet.common.errors import ConfigError
from fedhet.common.files import expanded
from fedhet.common.results import COMPLETED, METRICS, read_rows, summary_of
from fedhet.conf import compose_overrides, plain_part, quoted
from fedhet.natural_clients import count_here, with_natural_clients
from fedhet.runtimes.flower_install import LaunchError
from fedhet.runtimes.processes import end_with_parent
from fedhet.tasks import build_task


@dataclass(frozen=True)
class RunResult:
    """What a run has left in its results directory.

    Attributes:
        folder: the results directory.
        summary: what summary.json says: accuracy, seconds, bytes, versions, status.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def metrics(self) -> pd.DataFrame:
        """A row per round, by its number: accuracy, loss, train_loss, bytes_up and so on."""
        return pd.DataFrame(read_rows(self.folder / METRICS)).set_index("round")


def run(*overrides: str, results_dir: str | Path | None = None) -> RunResult:
    """Run a recipe as ``fedhet OVERRIDES`` does, in processes of its own.

    Args:
        overrides: such as ``"strategy=fedpvr"``, ``"partition.alpha=0.1"``.
        results_dir: an empty or new folder; None: a new one in the system's temporary folder.

    Raises:
        ConfigError: for a recipe that cannot run.
        LaunchError: if the run has failed or diverged; the message ends with what it said.
    """
    _require_words(overrides)
    compose_overrides(tuple(overrides))
    if any(word.partition("=")[0] == "results_dir" for word in overrides):
        raise ConfigError("results_dir is an argument: run(..., results_dir=FOLDER)")
    given = str(results_dir or tempfile.mkdtemp(prefix="fedhet-run-"))
    folder = expanded(given, "results_dir").absolute()
    words = [*overrides, f"results_dir={quoted(str(folder))}"]
    command = [sys.executable, "-m", "fedhet", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=end_with_parent
    )
    summary = summary_of(folder)
    if done.returncode or summary.get("status") != COMPLETED:
        said = (done.stderr or done.stdout).strip()
        raise LaunchError(f"fedhet {' '.join(words)} ended with code {done.returncode}:\n{said}")
    return RunResult(folder, summary)


def partition(*overrides: str) -> pd.DataFrame:
    """Return how many training examples of each class each client holds, without running.

    Args:
        overrides: such as ``"partition.alpha=0.1"``, ``"clients=20"``.

    Returns:
        clients by classes.

    Raises:
        ConfigError: for a wrong recipe, or one whose clients are the nodes of a deployment.
    """
    _require_words(overrides)
    recipe = compose_overrides(tuple(overrides)).copy()  # a composed recipe is shared
    with_natural_clients(recipe, overrides, count_here)  # a notebook has threads: no fork
    if not recipe.clients:
        raise ConfigError("clients=0 takes the number from the connected SuperNodes: set clients")
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=int(recipe.seed), num_clients=int(recipe.clients))
    counts = pd.DataFrame(task.class_counts(), columns=list(task.count_names))
    return counts.rename_axis(index="client", columns="class")


def _require_words(overrides: Sequence[object]) -> None:
    """Refuse a list of words in place of words."""
    for one in overrides:
        if not isinstance(one, str):
            raise ConfigError(f"{one!r} is not a text KEY=VALUE (write run(*words) of a list)")
