"""The task of a finished run, also with other values: what --task KEY=VALUE of a command names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedhet.common.errors import ConfigError
from fedhet.common.results import summary_of
from fedhet.load_run import label_metadata_of, recipe_of, task_of
from fedhet.tasks import AnyTask
from fedhet.tasks.column_statistics import ColumnStatistics
from fedhet.tasks.table_task import PUBLIC_COLUMNS
from fedhet.tasks.tabular import REFERENCE

OPTIONS, PUBLIC = "task.data_options", "public"
ADVICE = {
    "classes": "name them by --task classes=[...] in the order of its labels",
    "vocabulary": "name its words by --task vocabulary_file=FILE, a word a line, by rank",
}


def changed_task(folder: Path, words: Sequence[str], *, best: bool = False) -> AnyTask:
    """Return the run's task with these changes, if the model's labels mean the same in it.

    Args:
        folder: a results directory.
        words: changes of the run's task, such as ``path=/data/new``.
        best: of the run's two models the one of the best round.
    """
    stored = label_metadata_of(folder, best=best)
    recipe = recipe_of(folder)
    changed = _changed(recipe, words)
    keys = [word.partition("=")[0] for word in words]
    chosen = f"data_options.{PUBLIC}" in keys  # the rows that columns are fitted to
    if "path" in keys and not chosen and _fits_alone(changed):
        stored |= _keep_columns(recipe, changed, stored)
    task = task_of(changed, stored)
    metadata = task.label_metadata()
    both = all(PUBLIC_COLUMNS in one for one in (stored, metadata))
    if both and not chosen and not _same(stored, metadata):
        raise ConfigError(
            f"the table {changed.task.path} has changed since the run in {folder}, or its public "
            "part: its columns would be scaled otherwise than the model's; --task path=FILE scales "
            "those of another table, or of this one, as the model's"
        )
    for key, advice in ADVICE.items():
        if key in stored and stored[key] != metadata.get(key):
            raise ConfigError(
                f"the model of {folder} was trained with other {key} than --task "
                f"{' '.join(words) or '(nothing)'} gives: {advice}"
            )
    return task


def task_of_model(recipe: DictConfig, stored: Mapping[str, str]) -> AnyTask:
    """Return a run's task without its table, if ``stored`` says what columns were fitted to.

    ``stored`` is what the model's file has (``label_metadata_of``).
    """
    recipe, known = recipe.copy(), dict(stored)
    if PUBLIC_COLUMNS in known:
        known |= _keep_columns(recipe, recipe, known)
    if "columns" in known:
        recipe.task.path = None
    return task_of(recipe, known)


def require_same_examples(folder: Path, task: AnyTask, *, train: bool = False) -> None:
    """Refuse examples that are not the run's, though they lie where those were.

    Those for testing, with ``train`` also those to train on.
    """
    ran = summary_of(folder).get("data", {})
    for split, ours in task.data_used(train=train).items():
        theirs = ran.get(split, {})
        if theirs.get("sha256", ours["sha256"]) != ours["sha256"]:
            what = "test set has" if split == "test" else "training examples have"
            raise ConfigError(
                f"the {what} changed since the run in {folder}: that one was {theirs}, and this "
                f"one is {ours}; `fedhet-evaluate RUN --task path=FOLDER` evaluates on another one"
            )


def _changed(recipe: DictConfig, words: Sequence[str]) -> DictConfig:
    for word in words:
        if "=" not in word:
            raise ConfigError(f"--task {word} has no value: write --task {word}=VALUE")
    try:
        changes = OmegaConf.from_dotlist(list(words))
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"--task {' '.join(words)} cannot be read: {error}") from None
    changed = OmegaConf.merge(recipe, {"task": changes})
    assert isinstance(changed, DictConfig)
    return changed


def _fits_alone(changed: DictConfig) -> bool:
    """Return whether a table on this machine says what the model's inputs mean."""
    data, fit = (OmegaConf.select(changed, key) for key in ("task.data", f"{OPTIONS}.fit"))
    return bool(data == REFERENCE and fit != "federated")


def _same(*models: Mapping[str, str]) -> bool:
    """Return whether the inputs of two models mean the same."""
    old, new = (json.loads(metadata[PUBLIC_COLUMNS]) for metadata in models)
    before, now = (ColumnStatistics.from_json(one.pop("fitted")) for one in (old, new))
    return old == new and before.is_close(now)


def _keep_columns(
    recipe: DictConfig, changed: DictConfig, stored: Mapping[str, str]
) -> dict[str, str]:
    """Let ``changed`` have the columns of the run's table, and return what they are fitted to."""
    if PUBLIC_COLUMNS in stored:
        fitted = json.loads(stored[PUBLIC_COLUMNS])
        columns = fitted.pop("fitted")
        changed.task.data_options = OmegaConf.merge(changed.task.data_options, fitted)
        return {"columns": columns}
    old, new = (OmegaConf.select(one, "task.path") for one in (recipe, changed))
    public = OmegaConf.select(changed, f"{OPTIONS}.{PUBLIC}")
    if new == old or isinstance(public, str):  # a run of before they were stored
        return {}
    raise ConfigError(
        f"--task path={new}: the model's inputs were scaled by rows of {old}, whose statistics "
        "this run has not stored; write these rows into a file and add --task "
        "data_options.public=THAT_FILE"
    )
