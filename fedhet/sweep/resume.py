"""What `--resume` does with the folder of a job: skip it, go on from its checkpoint, or afresh."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf import fingerprint, resume_fingerprint
from fedhet.runtimes.deployment.run_record import read_record

_LOG = "log.txt"
_PATH_THAT_COUNTS = "task.vocabulary_file"


class Plan(Enum):
    """What to do with a job's folder.

    ``REPLACE`` is for a folder that holds another recipe's run: a search whose earlier trials now
    end otherwise proposes others, and an experiment file may have been edited.
    """

    SKIP = "skip"
    CONTINUE = "continue"
    AFRESH = "afresh"
    REPLACE = "replace"


def plan_for(folder: Path, recipe: DictConfig) -> Plan:
    """Return what to do with a job's folder.

    Args:
        folder: the job's results directory; need not be there.
        recipe: the job's recipe.
    """
    recipe = _as_the_apps_have_it(recipe)
    summary = read_summary(folder)
    completed = summary.get("status") == "completed"
    if completed and _recipe_of(summary) == fingerprint(recipe)["recipe"]:
        return Plan.SKIP
    record = read_record(folder)
    if record is not None:  # its checkpoints may lie elsewhere, and it may still go on
        return Plan.CONTINUE if record.recipe == resume_fingerprint(recipe) else Plan.REPLACE
    last = _last_checkpoint(folder)
    if last is not None and last["recipe"] != resume_fingerprint(recipe):
        return Plan.REPLACE
    if last is not None and last["round"] < int(recipe.rounds):
        return Plan.CONTINUE
    return Plan.REPLACE if completed else Plan.AFRESH


def make_ready(folder: Path, plan: Plan) -> None:
    """Make a job's folder ready for what was planned.

    A folder that is replaced goes below ``replaced/`` beside it: it holds measured results. What a
    run leaves that failed before its first checkpoint is removed, but for its log.
    """
    if plan is Plan.REPLACE:
        _set_aside(folder)
    elif plan is Plan.AFRESH and folder.exists():
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOG:
                path.unlink()
    folder.mkdir(parents=True, exist_ok=True)


def read_summary(folder: Path) -> Mapping[str, Any]:
    """Return the summary.json of a results directory, empty if there is none."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


def _as_the_apps_have_it(recipe: DictConfig) -> DictConfig:
    """Return the recipe with the one path that counts as a part of it made absolute."""
    path = OmegaConf.select(recipe, _PATH_THAT_COUNTS)
    if isinstance(path, str) and path:
        recipe = recipe.copy()
        OmegaConf.update(recipe, _PATH_THAT_COUNTS, str(Path(path).expanduser().absolute()))
    return recipe


def _recipe_of(summary: Mapping[str, Any]) -> str | None:
    hashes = summary.get("fingerprint")
    return hashes.get("recipe") if isinstance(hashes, dict) else None


def _last_checkpoint(folder: Path) -> Mapping[str, Any] | None:
    """Return what the last checkpoint says of itself; reading its tensors would take torch."""
    found = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    if not found:
        return None
    with found[-1].open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    about = json.loads(header["__metadata__"]["fedhet"])
    assert isinstance(about, dict)
    return about


def _set_aside(folder: Path) -> None:
    beside = folder.parent / "replaced"
    beside.mkdir(exist_ok=True)
    names = (f"{folder.name}_{number}" for number in range(1, 1000))
    folder.rename(next(beside / name for name in names if not (beside / name).exists()))
