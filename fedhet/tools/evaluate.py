"""fedhet-evaluate: evaluates the models of finished runs on their own or another test set.

    fedhet-evaluate RUN [RUN ...] [--best] [--metric NAME ...] [--task KEY=VALUE ...] [--state FILE]
    fedhet-evaluate RUN [RUN ...] --by-site | --cross-site [--best] [--metric NAME ...]

RUN is the folder of a run or of a sweep. The command trains nothing. It prints the loss, for
classes the accuracy and the lowest accuracy of a class, and the run's metrics (evaluation.metrics)
or the ones that --metric names instead; --out also writes the figures of every class. It evaluates
the last model, or with --best the best round's (checkpoint.best). --task changes a key of the run's
task, such as --task path=/data/new. --augmented also flips and crops test images like training
images, as in code that uses one transform for both (the released code of FedDW). If clients keep
their own tensors or models, such as FedPer's heads and Ditto's models, --state names the file of
one client.

--by-site evaluates the model on what each site (client) holds out, with the worst site, the spread,
the confusion matrix and for two classes a threshold. --cross-site also evaluates each site's own
model at every site. Both write by_site.json into the run's folder, which fedhet-report shows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from torch import nn

from fedhet.changed_task import changed_task, require_same_examples
from fedhet.commands import (
    add_trust,
    at_least,
    parser_of,
    reported_errors,
    say_error,
    table_console,
)
from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text, writable_file
from fedhet.common.results import BY_SITE
from fedhet.conf.metrics import check_metric_words
from fedhet.conf.trust import trust
from fedhet.load_run import model_of, recipe_of
from fedhet.report.blocks import Table
from fedhet.report.by_site import Measured, site_blocks
from fedhet.report.command import rich_table, show
from fedhet.report.names import listed
from fedhet.report.run_data import Run
from fedhet.report.sources import completed_runs
from fedhet.report.statistics import mean_text
from fedhet.tasks import AnyTask
from fedhet.tasks.config import ImageConfig
from fedhet.tasks.evaluation import Batched, class_accuracies, classifies, evaluate_model
from fedhet.tasks.metrics import MetricSet
from fedhet.tools.by_site import evaluate_sites


@dataclass(frozen=True)
class ModelFigures:
    """The figures of a model on a test set."""

    examples: int  # how many
    loss: float  # mean, by task.loss
    accuracy: float | None  # in [0, 1]; None but for a classification
    by_class: dict[str, float | None]  # accuracy on each class, by its name; None without examples
    metrics: dict[str, float]  # by name, f1/<class name> too; what is not defined is left out
    augmented: list[float]  # accuracy of each pass over augmented examples


def evaluate(
    folder: Path,
    words: Sequence[str] = (),
    passes: int = 0,
    seed: int = 0,
    state: Path | None = None,
    best: bool = False,
    metrics: Sequence[str] | None = None,
) -> ModelFigures:
    """Evaluate the model of the run in ``folder``.

    Args:
        folder: a results directory.
        words: changes of the run's task, such as ``path=/data/new``.
        passes: over augmented examples.
        seed: of the augmentation.
        state: a client's state file: its own model, where clients keep tensors or models.
        best: the model of the best round in place of the last one.
        metrics: of ``evaluation.metrics``; None: those of the run.
    """
    task = changed_task(folder, words, best=best)
    if passes and not isinstance(task.config, ImageConfig):
        raise ConfigError(
            f"--augmented {passes}: fedhet flips and crops only images that it reads itself, and "
            f"task={task.name} of {folder} has no such images"
        )
    if passes and not task.config.transform.augments:
        raise ConfigError(
            f"--augmented {passes}: the task of {folder} does not augment its training examples; "
            "set --task flip=true or --task crop_padding=4"
        )
    model = model_of(folder, task, state, best=best)
    if not words:
        require_same_examples(folder, task)
    device = next(model.parameters()).device
    data = task.test_data(device)
    if data is None:
        raise ConfigError(f"the task of {folder} has no test set: set --task test_data=...")
    words_of_run = recipe_of(folder).evaluation.get("metrics", [])
    names = list(words_of_run if metrics is None else metrics)
    collected = task.metric_set(names, per_class=True, device=device)
    loss, accuracy, by_class = _scores(model, data, task, collected)
    found = collected.compute() if collected else {}
    generator = torch.Generator().manual_seed(seed)
    augmented = [
        class_accuracies(model, data, task.loss, task.num_classes, generator=generator)[1]
        for _ in range(passes)
    ]
    return ModelFigures(len(data), loss, accuracy, by_class, found, augmented)


def _scores(
    model: nn.Module, data: Batched, task: AnyTask, collected: MetricSet | None
) -> tuple[float, float | None, dict[str, float | None]]:
    """Return loss, accuracy and the accuracy on each class; ``collected`` has the outputs then."""
    if not classifies(model):
        return (*evaluate_model(model, data, task.loss, metrics=collected), {})
    loss, accuracy, by_class = class_accuracies(
        model, data, task.loss, task.num_classes, metrics=collected
    )
    values = [None if value != value else value for value in by_class.tolist()]  # NaN: no examples
    return loss, accuracy, dict(zip(task.class_names, values, strict=True))


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; ``words`` replace the process's command line."""
    options = _parser().parse_args(words)
    with reported_errors("fedhet-evaluate"):
        if not _evaluate_all(options):
            raise SystemExit(1)


def _evaluate_all(options: argparse.Namespace) -> bool:
    """Print and write the figures of all runs; return whether all could be evaluated."""
    check_metric_words(options.metric or ())
    runs, left_out = completed_runs(options.runs)
    for reason in left_out:
        say_error("fedhet-evaluate", reason)
    if options.out is not None:  # before the evaluation, which takes long
        writable_file(options.out, "--out ")
    console, errors = table_console(), Console(stderr=True)
    for _, folder in runs if options.trust else ():
        trust(folder)
    if options.by_site or options.cross_site:
        if options.state or options.augmented:
            raise ConfigError("--by-site and --cross-site take no --state and no --augmented")
        return _evaluate_sites(runs, options, console) and not left_out
    found: list[tuple[Run, ModelFigures]] = []
    for run, folder in runs:
        errors.print(f"{run.name} ...", markup=False, highlight=False)
        try:
            figures = evaluate(
                folder,
                options.task,
                options.augmented,
                options.seed,
                options.state,
                options.best,
                options.metric,
            )
            found.append((run, figures))
        except ConfigError as error:
            say_error("fedhet-evaluate", error)
    if found:
        notes = _notes(found, options.augmented, options.state, best=options.best)
        console.print(rich_table(_table(found, notes)))
    if found and options.out is not None:
        content = [
            {"name": run.name, "method": run.method, "seed": run.seed, **asdict(figures)}
            for run, figures in found
        ]
        save_text(options.out, json.dumps(content, indent=1) + "\n")
        console.print(f"results  {options.out}", soft_wrap=True, highlight=False, markup=False)
    return len(found) == len(runs)


def _evaluate_sites(
    runs: Sequence[tuple[Run, Path]], options: argparse.Namespace, console: Console
) -> bool:
    """Print and store the figures by site of all runs; return whether all could be evaluated."""
    found: list[Measured] = []
    for run, folder in runs:
        Console(stderr=True).print(f"{run.name} ...", markup=False, highlight=False)
        try:
            writable_file(folder / BY_SITE, "")  # before the evaluation, which takes long
            figures = evaluate_sites(
                folder,
                options.task,
                options.metric,
                best=options.best,
                cross=options.cross_site,
            )
            figures.save(folder)
            found.append(Measured(run.name, [figures]))
        except ConfigError as error:
            say_error("fedhet-evaluate", error)
    show(site_blocks(found), console)
    if found and options.out is not None:
        content = [{"name": one.label, **asdict(one.first)} for one in found]
        save_text(options.out, json.dumps(content, indent=1) + "\n")
        console.print(f"results  {options.out}", soft_wrap=True, highlight=False, markup=False)
    return len(found) == len(runs)


def _table(found: Sequence[tuple[Run, ModelFigures]], notes: Sequence[str]) -> Table:
    """Return a row for each run; a column that no run has is left out."""
    names = dict.fromkeys(name for _, one in found for name in one.metrics if "/" not in name)
    frame = pd.DataFrame([_texts(run, figures, list(names)) for run, figures in found])
    return Table(frame.loc[:, (frame != "").any()], "; ".join(notes))


def _notes(
    found: Sequence[tuple[Run, ModelFigures]], passes: int, state: Path | None, *, best: bool
) -> list[str]:
    """Return what the table's caption says of the figures."""
    notes = ["the model of each run's best round"] if best else []
    notes += [f"augmented: mean and standard deviation of {passes} passes"] if passes else []
    own = [run.name for run, _ in found if run.settings.get("evaluation.model") == "clients"]
    if own and state is None:
        notes.append(
            f"these figures of {listed(own)} are the shared model's; the run measured the clients' "
            "models (evaluation.model=clients)"
        )
    return notes


def _texts(run: Run, one: ModelFigures, names: Sequence[str]) -> dict[str, str]:
    """Return a run's texts by column, "" for what it has not."""
    held = {name: value for name, value in one.by_class.items() if value is not None}
    augmented = [100 * value for value in one.augmented]
    lowest = min(held, key=held.__getitem__, default=None)
    return {
        "run": run.name,
        "examples": str(one.examples),
        "accuracy %": "" if one.accuracy is None else f"{100 * one.accuracy:.2f}",
        "loss": f"{one.loss:.4f}",
        **{name: f"{one.metrics[name]:.4g}" if name in one.metrics else "" for name in names},
        "lowest class": "" if lowest is None else f"{lowest}: {100 * held[lowest]:.2f}",
        "augmented %": mean_text(augmented, 2) if augmented else "",
    }


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-evaluate", __doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run or a sweep")
    task = "another value for a key of the task, such as path=/data/new; may be repeated"
    add("--task", action="append", default=[], metavar="KEY=VALUE", help=task)
    metric = "measure this instead of the run's evaluation.metrics, such as f1; may be repeated"
    add("--metric", action="append", metavar="NAME", help=metric)
    add("--best", action="store_true", help="the best round's model (checkpoint.best=true)")
    state = "evaluate the own model of the client with this state, client-*/round-*.safetensors"
    add("--state", type=Path, metavar="FILE", help=state)
    by_site = "evaluate at each site, and write by_site.json into the run's folder"
    add("--by-site", action="store_true", help=by_site)
    cross_site = "the same, and each site's own model at every site"
    add("--cross-site", action="store_true", help=cross_site)
    passes = "passes over the test images, flipped and cropped as for training (0)"
    add("--augmented", type=at_least(0), default=0, metavar="PASSES", help=passes)
    add("--seed", type=int, default=0, help="seed of the augmentation (0)")
    add("--out", type=Path, metavar="FILE", help="write all figures there, as JSON")
    add_trust(parser)
    return parser


if __name__ == "__main__":
    main()
