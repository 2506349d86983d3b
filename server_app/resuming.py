"""Restores a run from its checkpoint, or says why it cannot go on from there."""

from __future__ import annotations

from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log
from omegaconf import DictConfig, OmegaConf
from yaml import YAMLError

from fedhet.common.checksums import read_label
from fedhet.common.errors import ConfigError
from fedhet.common.nested import leaves
from fedhet.common.results import (
    CONFIG,
    METRICS,
    fits_rows,
    is_completed,
    read_rows,
    read_summary,
)
from fedhet.conf import FOLDER_KEYS, LONGER, NOTES, SITE_KEYS, plain_part, resolved
from fedhet.server_app.checkpoint import Checkpoint, RunOrigin, load_checkpoint
from fedhet.server_app.initial_model import KEY as INITIAL
from fedhet.server_app.listeners.stopping import EarlyStopping, why_ended
from fedhet.server_app.parts import RunParts

_SHOWN = 5  # changed keys in an error
_MAY_CHANGE = (*LONGER, *SITE_KEYS, *NOTES)


def restore(
    last: Path, recipe: DictConfig, folder: Path, parts: RunParts, origin: RunOrigin
) -> Checkpoint:
    """Restore the strategy from the checkpoint ``last`` of a run, and return it.

    The data of ``parts`` and ``origin`` get the initial model that the run began with.

    Raises:
        ConfigError: if the recipe or the examples are others, or no round is left to do.
    """
    if read_label(last).get("recipe") != origin.recipe:
        changes = _changes(recipe, folder, parts.task.classifier_tensors)
        raise ConfigError(
            f"resume=true, but {last} was written by another recipe{changes}; you may change only "
            f"{', '.join((*_MAY_CHANGE, *FOLDER_KEYS))} (its recipe is {folder / CONFIG})"
        )
    checkpoint = load_checkpoint(last, list(parts.initial))
    _check_not_done(checkpoint.state.round, last, recipe, folder)
    if initial := checkpoint.data.get(INITIAL):  # its file is not needed any more
        parts.data[INITIAL] = {"sha256": initial}
        origin.data[INITIAL] = initial
    _check_data(checkpoint, last, folder, parts, origin)
    log(INFO, "Resuming after round %s", checkpoint.state.round)
    for name, found in checkpoint.made_by.items():
        if origin.made_by.get(name) != found:
            text = "the rounds so far ran with %s %s, and the next ones run with %s"
            log(WARNING, text, name, found, origin.made_by.get(name))
    parts.strategy.restore(checkpoint.state)
    return checkpoint


def _changes(recipe: DictConfig, folder: Path, classifier_tensors: int) -> str:
    """Return which keys the recipe has otherwise than the run that it would continue."""
    try:
        before: Any = OmegaConf.to_container(OmegaConf.load(folder / CONFIG))
    except (OSError, ValueError, YAMLError):
        return ""
    old, new = (dict(leaves(one)) for one in (before, resolved(recipe, classifier_tensors)))
    changed = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
    keys = [key for key in changed if key.partition(".")[0] not in _MAY_CHANGE]
    found = "; ".join(_change(key, old, new) for key in keys[:_SHOWN])
    return f" ({found})" if found else ""


def _change(key: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    if key not in old:  # fedhet may be newer than the run
        return f"{key}={new[key]}, a key that recipe did not have"
    if key not in new:
        return f"no {key}, was {old[key]}"
    return f"{key}={new[key]}, was {old[key]}"


def _check_not_done(done: int, last: Path, recipe: DictConfig, folder: Path) -> None:
    metrics = folder / METRICS  # it may be lost, which is said already
    rows = read_rows(metrics) if is_completed(folder) and metrics.exists() else []
    # else it may lack no more than its end: its own, or that of an extension
    completed = is_completed(folder) and (not rows or fits_rows(read_summary(folder), rows))
    if done > recipe.rounds or (done == recipe.rounds and completed):
        raise ConfigError(
            f"rounds={recipe.rounds} are done already: {last} has round {done}; set rounds "
            "higher to continue"
        )
    rows, rule = [row for row in rows if row["round"] <= done], plain_part(recipe, "early_stopping")
    reason = why_ended(rows, recipe.target_accuracy, EarlyStopping(**rule))
    if completed and reason:
        raise ConfigError(
            f"resume=true, but the run in {folder} has ended after round {done}: {reason}; set "
            "early_stopping.patience or target_accuracy higher, or null, to continue"
        )


def _check_data(
    checkpoint: Checkpoint, last: Path, folder: Path, parts: RunParts, origin: RunOrigin
) -> None:
    before = checkpoint.data
    if "columns" in before.keys() - origin.data.keys():
        raise ConfigError(
            f"resume=true, but {folder} has lost its columns.json, which says how the sites' "
            "columns were fitted: bring it back, or begin anew in another results_dir"
        )
    for split in sorted(origin.data.keys() & before.keys()):
        if origin.data[split] != before[split]:
            what = split if split == "columns" else f"{split} examples"
            raise ConfigError(
                f"resume=true, but the {what} have changed since the run began: "
                f"{parts.data[split]}; {last} names the hash {before[split]}"
            )
