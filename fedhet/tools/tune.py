"""fedhet-tune: chooses settings by the score on clients' held-out examples, then runs with them.

    fedhet-tune +experiment=fedpvr/reduced strategy=fedavg,fedpvr --rounds 10 --out results/tuned

It takes the same words as `fedhet`; several values of a key make several cells, and each cell has
its own choice. --grid names the candidates, by default FedPVR's: the rates .05, .1, .2 and .3, and
the schedules constant, cosine and multi_step.

A candidate's score is the recipe's `objective` (the accuracy, or the loss where a task has none) of
its last model on the clients' held-out examples (the recipe needs partition.holdout), the mean over
clients weighted by examples; the lower loss breaks ties. With evaluation.model=clients (Ditto and
others) it is that of the clients' own models, the plain mean over clients (personal_accuracy).
Candidates do not use the test set, so they do not stop early and keep no best model; the run with
the choice follows the recipe. --out gets search/CELL, a sweep of the candidates; choices.json, all
scores; and runs/CELL, the run with the choice, which its config.yaml names (`choice`). The same
command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig
from rich.console import Console

from fedhet.commands import at_least, parser_of, reported_errors
from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text, writable_folder
from fedhet.common.metrics import (
    BEST,
    CLIENT,
    PERSONAL,
    MetricName,
    larger_is_better,
    metric_of,
    own_names,
)
from fedhet.common.results import COMPLETED, FAILED
from fedhet.conf import compose, explain_words, quoted
from fedhet.runtimes.processes import end_with_parent
from fedhet.sweep.resume import Plan, make_ready, plan_for
from fedhet.sweep.sweep_folder import INDEX, SweepFolder

GRID = ("local.lr=0.05,0.1,0.2,0.3", "schedule=constant,cosine,multi_step")
TIE = f"{CLIENT}loss"
CHOICES = "choices.json"


@dataclass(frozen=True)
class Candidate:
    """A point of the grid, and its figures on the held-out examples."""

    words: Sequence[str]  # that set it
    score: float | None = None  # None if the run failed
    loss: float | None = None  # of the same model on the same examples; None of clients' own models


@dataclass(frozen=True)
class Score:
    """What candidates are compared by."""

    figure: str  # of summary.json: client_accuracy, personal_rmse, ...
    maximises: bool  # whether larger values are better

    def best(self, candidates: Sequence[Candidate]) -> Candidate | None:
        """Return the candidate of the best score; of equal ones that of the lowest loss."""
        scored = [one for one in candidates if one.score is not None]
        return min(scored, key=self._place, default=None)

    def _place(self, one: Candidate) -> tuple[float, float]:
        score = one.score or 0.0
        return -score if self.maximises else score, math.inf if one.loss is None else one.loss


@dataclass(frozen=True)
class TuningSearch:
    """What is searched, and where it is written."""

    grid: Sequence[str]  # words with several values
    rounds: int | None  # of a candidate; None: as many as the run's
    folder: Path  # of all that is written


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; ``words`` replace the process's command line."""
    options = _parser().parse_args(words)
    with reported_errors("fedhet-tune"):
        search = TuningSearch(options.grid, options.rounds, options.out.absolute())
        cells = expanded(options.words)
        points = expanded(search.grid)
        # the sweep checks the other points before its first job
        scores = [score_of(checked(cell, points[0])) for cell in cells]
        writable_folder(search.folder, "--out ")
        for number, (cell, score) in enumerate(zip(cells, scores, strict=True)):
            tune(cell, cell_name(number, cell, cells), points, search, score)


def expanded(words: Sequence[str]) -> list[list[str]]:
    """Return the words of every combination of their values."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(words))
    except HydraException as error:
        raise explain_words(error, words) from None
    try:
        (batch,) = BasicSweeper.split_arguments(parsed, None)
    except HydraException:
        raise ConfigError(f"{' '.join(words)}: name the values one by one, KEY=A,B") from None
    return [list(combination) for combination in batch]


def checked(cell: Sequence[str], point: Sequence[str]) -> DictConfig:
    """Return a cell's recipe; refuse one that does not compose, or that holds out no examples."""
    recipe = compose({"overrides": json.dumps([*cell, *point])})
    if recipe.partition.name != "site" and not recipe.partition.holdout:
        raise ConfigError(
            f"partition.holdout={recipe.partition.holdout}: fedhet-tune chooses by the score on "
            "held-out examples; set it to a share in (0, 1), such as 0.1 (FedPVR: 0.01)"
        )
    return recipe


def cell_name(number: int, cell: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Return a folder's name: the cell's number, and the values in which cells differ."""
    varying = [word for word in cell if not all(word in other for other in cells)]
    values = [re.sub(r"[^\w.+-]+", "-", word.partition("=")[2]) for word in varying]
    return "_".join([str(number), *values])


def score_of(recipe: DictConfig) -> Score:
    """Return what candidates are compared by: the objective, of the models that are scored."""
    objective, metrics = recipe.objective, recipe.evaluation.metrics
    own_models = recipe.evaluation.model == "clients"
    name = MetricName.read(objective.removeprefix(BEST)).name
    classifies = recipe.task.get("kind", "classification") == "classification"
    if name == "accuracy" and not classifies and name not in metrics:
        name = "loss"
    is_own = name in own_names(metrics)
    if metric_of(name) is None and not is_own:
        raise ConfigError(f"objective={objective}: fedhet-tune needs a metric, such as accuracy")
    if name == "loss" and own_models:
        raise ConfigError(
            f"objective={objective}: clients do not send their own models' loss "
            "(evaluation.model=clients); name a metric, such as evaluation.metrics=[rmse] "
            "objective=rmse"
        )
    stopping = recipe.early_stopping
    if is_own and (stopping.mode == "auto" or MetricName.read(stopping.metric).name != name):
        raise ConfigError(
            f"objective={objective} is your own function: set early_stopping.metric={name} and "
            "early_stopping.mode=max (larger values are better) or min"
        )
    maximises = stopping.mode == "max" if is_own else larger_is_better(name)
    return Score(str(MetricName(name, PERSONAL if own_models else CLIENT)), maximises)


def tune(
    cell: Sequence[str],
    name: str,
    points: Sequence[Sequence[str]],
    search: TuningSearch,
    score: Score,
) -> None:
    """Search one cell's grid, log the choice, and run with it."""
    sweep, run = search.folder / "search" / name, search.folder / "runs" / name
    code = _launch(_search_words(cell, sweep, search, score))
    if not (sweep / INDEX).is_file():
        raise SystemExit(code)  # it was refused, and has said why
    if (status := SweepFolder(sweep).read().status) not in (COMPLETED, FAILED):
        raise ConfigError(f"the search of {name} is {status}: the same command continues it")
    candidates = read_candidates(sweep, points, score)
    best = score.best(candidates)
    if best is None:
        raise ConfigError(f"no candidate of {name} has a score: see {sweep}/*/log.txt")
    after = f" after round {search.rounds}" if search.rounds is not None else ""
    reached = f"{score.figure} {best.score:.4f} on held-out examples{after}"
    scored = sum(one.score is not None for one in candidates)
    choice = f"{' '.join(best.words)}, by {reached}, the best of {scored}"
    if scored > 1 and len({(one.score, one.loss) for one in candidates}) == 1:
        choice = f"{' '.join(best.words)}, the first of {scored} with the same {reached}"
    path = search.folder / CHOICES
    choices = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    choices[name] = {
        "cell": list(cell),
        "chosen": list(best.words),
        "words": choice,
        "score": score.figure,
        "candidates": [asdict(one) for one in candidates],
    }
    save_text(path, json.dumps(choices, indent=1) + "\n")
    Console().print(f"choice   {name}: {choice}", markup=False, highlight=False, soft_wrap=True)
    words = [*cell, *best.words, f"choice={quoted(choice)}", f"results_dir={quoted(str(run))}"]
    plan = plan_for(run, compose({"overrides": json.dumps(words)}))
    if plan is Plan.SKIP:
        return
    make_ready(run, plan)
    if _launch([*words, "resume=true"] if plan is Plan.CONTINUE else words) != 0:
        raise ConfigError(f"the run with the choice failed: see {run}/log.txt")


def _search_words(
    cell: Sequence[str], sweep: Path, search: TuningSearch, score: Score
) -> list[str]:
    words = [*cell, *search.grid, f"objective={score.figure}"]
    words += [] if search.rounds is None else [f"rounds={search.rounds}"]
    # Without the experiment's own sweep; clients evaluate, the server does not, so nothing goes by
    # its evaluations.
    words += ["hydra.sweeper.params=null", "evaluation.clients=true", "evaluation.every=0"]
    words += ["early_stopping.patience=null", "target_accuracy=null", "checkpoint.best=false"]
    if not (sweep / INDEX).is_file():
        return ["-m", *words, f"hydra.sweep.dir={quoted(str(sweep))}"]
    before = SweepFolder(sweep).read().overrides
    if set(before) != set(words):
        raise ConfigError(
            f"--out {search.folder} holds another search ({' '.join(before)}): name another folder"
        )
    return ["-m", "--resume", str(sweep)]


def _launch(words: Sequence[str]) -> int:
    command = [sys.executable, "-m", "fedhet", *words]
    return subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode


def read_candidates(sweep: Path, points: Sequence[Sequence[str]], score: Score) -> list[Candidate]:
    """Return the grid's points with the figures of the search's jobs."""
    jobs = SweepFolder(sweep).jobs().values()
    found = []
    for point in points:
        figures: dict[str, Any] = {}
        for job in jobs:
            if job["status"] == "completed" and set(point) <= set(job["overrides"]):
                figures = job["figures"]
        loss = figures.get(TIE) if score.figure.startswith(CLIENT) else None
        found.append(Candidate(point, figures.get(score.figure), loss))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-tune", __doc__)
    add = parser.add_argument
    add("words", nargs="+", metavar="KEY=VALUE", help="the recipe, as fedhet takes it")
    add("--grid", nargs="+", default=list(GRID), metavar="KEY=A,B", help="values to choose from")
    add("--rounds", type=at_least(1), help="rounds of a candidate (as many as the run's)")
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    return parser


if __name__ == "__main__":
    main()
