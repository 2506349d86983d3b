"""What a finished run's models do at each site, and each site's own model at every site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig
from torch import nn

from fedhet.changed_task import changed_task, require_same_examples
from fedhet.common.decisions import MOST_CLASSES, Decisions, counts_of, decisions_of
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.results import METRICS, Row, read_rows, summary_of
from fedhet.load_run import model_of, recipe_of
from fedhet.report.site_data import BEST, NEW, Site, SiteFigures, Values
from fedhet.server_app.parts import STATES
from fedhet.strategies.base import local_model
from fedhet.strategies.round.client_snapshots import FILE, load_replies
from fedhet.tasks import AnyTask, pick_device
from fedhet.tasks.conformal.scores import probabilities_of
from fedhet.tasks.evaluation import Batched, classifies, evaluate_model, logits_of


def evaluate_sites(
    folder: Path,
    words: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    *,
    best: bool = False,
    cross: bool = False,
) -> SiteFigures:
    """Evaluate a run's models at each of its sites.

    Args:
        folder: a results directory.
        words: changes of the run's task, such as ``path=/data/new``.
        metrics: of ``evaluation.metrics``; None: those of the run.
        best: the shared model of the best round in place of the last one.
        cross: also each site's own model at every site.

    Raises:
        ConfigError: if the sites' examples are not on this machine, or with ``cross`` if the run
            has not kept the sites' own models or nothing is held out.
    """
    recipe, summary = recipe_of(folder), summary_of(folder)
    if cross and best:
        raise ConfigError("--cross-site has the sites' last models: leave out --best")
    task = changed_task(folder, words, best=best)
    if not words:
        require_same_examples(folder, task, train=True)
    examples = _Examples(task, recipe)
    if cross and examples.trained_on:
        raise ConfigError(
            f"--cross-site: in {folder} no site holds examples out, and a model is too good on "
            "what it was trained on: run it with partition.holdout=0.2"
        )
    names = list(recipe.evaluation.get("metrics", [])) if metrics is None else list(metrics)
    own: dict[int, dict[str, float]] = {}  # each site's own model there
    matrix: dict[int, list[dict[str, float]]] = {}
    for client, model in () if best else _own_models(folder, task):
        if cross:
            matrix[client] = _at_sites(model, examples, task, names)
            own[client] = matrix[client][client]
        elif client in examples.data:
            own[client] = _scores(model, examples.data[client], task, names)
    if cross and not matrix:
        raise ConfigError(
            f"--cross-site: {folder} has no model of a single site: run it with "
            "checkpoint.client_models=true, strategy=local or a personalised method"
        )
    shared = _shared_model(folder, task, required=not own, best=best)
    about = summary.get("best_model", {}) if best else summary
    return SiteFigures(
        examples.sites,
        shared={} if shared is None else _columns(_at_sites(shared, examples, task, names)),
        own=_columns([own.get(client, {}) for client in examples.clients]),
        models=tuple(matrix),
        matrix=_by_metric(list(matrix.values())),
        decisions=None if shared is None else _decisions(shared, examples, task),
        model=BEST if best else NEW,
        trained_on=examples.trained_on,
        parameters_sha256=str(about.get("parameters_sha256", "")),
        task=tuple(words),
    )


class _Examples:
    """The examples that each site is evaluated on, by client.

    These are what the site holds out, or if no site holds anything out what it trains on; all of
    its examples if it never trained.
    """

    def __init__(self, task: AnyTask, recipe: DictConfig) -> None:
        if recipe.partition.name == "site":
            raise ConfigError(
                "--by-site: with partition=site the examples are at the sites: run it with "
                "evaluation.clients=true evaluation.per_client=true evaluation.confusion=true, and "
                "fedhet-report has the tables"
            )
        unseen, names, device = task.unseen_clients(), task.client_names, pick_device("auto")
        self.clients = list(range(task.num_clients))
        parts = [task.client_data(client, device) for client in self.clients]
        held_out = {client: held for client, (_, held) in enumerate(parts) if held is not None}
        self.trained_on = not held_out
        self.data: dict[int, Batched] = {
            client: held_out.get(client, data)
            for client, (data, _) in enumerate(parts)
            if client in held_out or self.trained_on or client in unseen
        }
        self.sites = tuple(
            Site(
                client,
                names[client] if names else "",
                len(data),
                len(held) if held is not None else 0,
                client in unseen,
            )
            for client, (data, held) in enumerate(parts)
        )


def _shared_model(folder: Path, task: AnyTask, *, required: bool, best: bool) -> nn.Module | None:
    """Return the run's model; None if the sites share only a part of it, or nothing."""
    try:
        return model_of(folder, task, best=best)
    except ConfigError:
        if required:
            raise
        return None


def _own_models(folder: Path, task: AnyTask) -> Iterator[tuple[int, nn.Module]]:
    """Yield the clients and their own models, as the run has left them.

    A personalised method keeps them with the clients' states; otherwise they are what the clients
    had trained in the last round (checkpoint.client_models).
    """
    states = _last_states(folder)
    if states and _makes_model(folder, task, next(iter(states.values()))):
        for client, path in states.items():
            yield client, model_of(folder, task, path)
    elif (folder / FILE).is_file():
        params, replies = load_replies(folder / FILE)
        for reply in replies:
            model = model_of(folder, task)
            model.load_state_dict(dict(local_model(params, reply)), strict=False)
            yield reply.client_id, model


def _last_states(folder: Path) -> dict[int, Path]:
    """Return each client's state after the last round in which its reply counted."""
    counted = {client: row["round"] for row in _rows(folder) for client in row.get("clients", ())}
    found = {}
    for state in sorted((folder / STATES / str(summary_of(folder).get("run"))).glob("client-*")):
        client, files = int(state.name.removeprefix("client-")), sorted(state.glob("round-*.saf*"))
        of_last = state / f"round-{counted.get(client, 0):06d}.safetensors"
        if files:
            found[client] = of_last if of_last in files else files[-1]
    return found


def _rows(folder: Path) -> list[Row]:
    return read_rows(folder / METRICS) if (folder / METRICS).is_file() else []


def _makes_model(folder: Path, task: AnyTask, state: Path) -> bool:
    """Return whether a client's state has its own model: SCAFFOLD's, say, has none."""
    try:
        model_of(folder, task, state)
    except DamagedFileError:
        raise
    except ConfigError:
        return False
    return True


def _at_sites(
    model: nn.Module, examples: _Examples, task: AnyTask, names: Sequence[str]
) -> list[dict[str, float]]:
    """Return the model's scores at each site; empty where nothing can be evaluated."""
    return [
        _scores(model, examples.data[client], task, names) if client in examples.data else {}
        for client in examples.clients
    ]


def _scores(
    model: nn.Module, data: Batched, task: AnyTask, names: Sequence[str]
) -> dict[str, float]:
    """Return accuracy, if the model classifies, loss and the metrics of one model on examples."""
    collected = task.metric_set(names, per_class=False, device=pick_device("auto"))
    loss, accuracy = evaluate_model(model, data, task.loss, metrics=collected)
    found = {} if accuracy is None else {"accuracy": accuracy}
    return found | {"loss": loss} | (collected.compute() if collected else {})


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, Values]:
    """Return the values by metric, in the order of the rows; None where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _by_metric(matrix: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, list[Values]]:
    names = dict.fromkeys(name for row in matrix for scores in row for name in scores)
    return {name: [[scores.get(name) for scores in row] for row in matrix] for name in names}


# ---- right and wrong answers ---------------------------------------------------------------------


def _decisions(model: nn.Module, examples: _Examples, task: AnyTask) -> Decisions | None:
    """Return the model's answers on all sites' examples; None if an example has no one class."""
    if not classifies(model) or task.num_classes > MOST_CLASSES:
        return None
    found = {client: logits_of(model, data) for client, data in examples.data.items()}
    if any(labels.ndim > 1 for _, labels in found.values()):
        return None
    counts = {
        client: counts_of(probabilities_of(logits, 1.0), labels)
        for client, (logits, labels) in found.items()
    }
    return decisions_of(counts, examples.clients, task.class_names)
