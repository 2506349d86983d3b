"""The task of a finished run with other values: what --task KEY=VALUE of a command names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from fedhet.common.errors import ConfigError
from fedhet.load_run import label_metadata_of, recipe_of, task_of
from fedhet.tasks import AnyTask
from fedhet.tasks.table_task import PUBLIC_COLUMNS
from fedhet.tasks.tabular import REFERENCE

OPTIONS = "task.data_options"
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
    if _reads_other_table(recipe, changed):
        stored |= _keep_columns(recipe, changed, stored)
    task = task_of(changed, stored)
    metadata = task.label_metadata()
    for key, advice in ADVICE.items():
        if key in stored and stored[key] != metadata.get(key):
            raise ConfigError(
                f"the model of {folder} was trained with other {key} than --task "
                f"{' '.join(words) or '(nothing)'} gives: {advice}"
            )
    return task


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


def _reads_other_table(recipe: DictConfig, changed: DictConfig) -> bool:
    """Return whether another table's own first rows would say what the model's inputs mean."""
    old, new = (OmegaConf.select(one, "task.path") for one in (recipe, changed))
    data = OmegaConf.select(changed, "task.data")
    if data != REFERENCE:
        return False
    public, fit = (OmegaConf.select(changed, f"{OPTIONS}.{name}") for name in ("public", "fit"))
    return bool(new != old and fit != "federated" and not isinstance(public, str))


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
    raise ConfigError(
        f"--task path={new}: the model's inputs were scaled by rows of {old}, whose statistics "
        "this run has not stored; write these rows into a file and add --task "
        "data_options.public=THAT_FILE"
    )
