"""`--resume`: continues a sweep. fedhet's own flag, taken from the command line before Hydra.

fedhet -m --resume results/2026-11-21_10-00-00_sweep     # the words are in its sweep.json
fedhet -m --resume strategy=fedavg,scaffold seed=0,1     # the newest sweep of the same words
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from fedhet.common.checksums import read_label
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.results import (
    COMPLETED,
    DIVERGED,
    LOG,
    METRICS,
    read_rows,
    read_summary_or_empty,
)
from fedhet.conf import HASHED_PATHS, fingerprint, plain_part, quoted, resume_fingerprint
from fedhet.runtimes.deployment.run_record import read_record
from fedhet.server_app.listeners.stopping import EarlyStopping, why_ended
from fedhet.sweep.sweep_folder import SweepFolder

_FLAG = "--resume"
_SWEEP_DIR = "hydra.sweep.dir"
_HOW = ("hydra/launcher", "hydra.launcher", "runtime", "device", _SWEEP_DIR)  # may change

_resuming = False


def resuming() -> bool:
    """Return whether this process was started with ``--resume``."""
    return _resuming


def take_resume(words: Sequence[str]) -> list[str]:
    """Return the command line for Hydra, and remember whether ``--resume`` was in it."""
    global _resuming
    rest, folder = _split(words)
    _resuming = len(rest) != len(words)
    if not _resuming:
        return rest
    if not any(word in ("-m", "--multirun") for word in rest):
        raise ConfigError(
            "--resume continues a sweep: fedhet -m --resume FOLDER; to continue one run: "
            "fedhet ... results_dir=FOLDER resume=true"
        )
    typed = [word for word in rest if _is_override(word)]
    flags = [word for word in rest if not _is_override(word)]  # and their values
    path = folder or _given_folder(typed) or _newest_of(typed)
    typed = [word for word in typed if key_of(word) != _SWEEP_DIR]
    replaced = {_SWEEP_DIR, *map(key_of, typed)}
    saved = [word for word in SweepFolder(path).read().overrides if key_of(word) not in replaced]
    return [*flags, *saved, *typed, f"{_SWEEP_DIR}={quoted(str(path.absolute()))}"]


def key_of(word: str) -> str:
    """Return the key of an override."""
    return word.partition("=")[0].lstrip("+~")


def _split(words: Sequence[str]) -> tuple[list[str], Path | None]:
    """Return the words without --resume, and the folder that was given with it."""
    rest, folder, before = [], None, ""
    for word in words:
        names_folder = "=" not in word or Path(word).is_dir()
        if before == _FLAG and not word.startswith("-") and names_folder:
            folder = Path(word)
        elif word.startswith(f"{_FLAG}="):
            folder = Path(word.removeprefix(f"{_FLAG}="))
        elif word != _FLAG:
            rest.append(word)
        before = word
    return rest, folder


def _given_folder(typed: Sequence[str]) -> Path | None:
    given = [word.partition("=")[2] for word in typed if key_of(word) == _SWEEP_DIR]
    return Path(given[-1].strip("'\"")) if given else None


def _newest_of(typed: Sequence[str]) -> Path:
    """Return the newest sweep below results/ that was started with the same words."""
    found = []
    for index in Path.cwd().glob("results/*/sweep.json"):
        try:
            sweep = SweepFolder(index.parent).read()
        except ConfigError:  # of another version
            continue
        if _what_runs(sweep.overrides) == _what_runs(typed):
            found.append((sweep.began, index.parent))
    if not found:
        raise ConfigError(
            f"no sweep below {Path.cwd() / 'results'} was started with these words: "
            f"{' '.join(typed) or '(none)'}; name its folder: fedhet -m --resume FOLDER"
        )
    return max(found)[1]


def _what_runs(words: Sequence[str]) -> set[str]:
    return {word for word in words if not key_of(word).startswith(_HOW)}


def _is_override(word: str) -> bool:
    return word.startswith("~") or ("=" in word and not word.startswith("-"))


class FolderTaken(ConfigError):
    """Another job, or something else, has the job's folder."""


class Plan(Enum):
    """What to do with a job's folder."""

    SKIP = "skip"
    CONTINUE = "continue"
    RESTART = "restart"


def plan_for(folder: Path, recipe: DictConfig) -> Plan:
    """Return what to do with a job's results directory, which need not exist.

    Raises:
        FolderTaken: if it has a run that the recipe cannot continue.
    """
    recipe = _with_absolute_paths(recipe)
    summary = read_summary_or_empty(folder)
    completed = summary.get("status") == COMPLETED
    hashes = summary.get("fingerprint")
    # a run that diverged would do so again
    if (completed or summary.get("status") == DIVERGED) and isinstance(hashes, dict):
        if hashes.get("recipe") == fingerprint(recipe)["recipe"]:
            return Plan.SKIP
    if completed and "stop_reason" in summary and _has_ended(folder, recipe):
        return Plan.SKIP
    same, record, last = resume_fingerprint(recipe), read_record(folder), _last_checkpoint(folder)
    if record is not None:  # a deployment: its checkpoints may be elsewhere, and it may still run
        if record.recipe == same:
            return Plan.CONTINUE
    elif last is None and not completed:
        return Plan.RESTART
    elif last is not None and last.get("recipe") == same:
        left = int(recipe.rounds) - last["round"]
        if left > 0 or (left == 0 and not completed):  # it may lack no more than its end
            return Plan.CONTINUE
    raise FolderTaken(
        f"{folder} has a run that this job cannot continue: its recipe is another one, it has more "
        f"rounds than rounds={recipe.rounds}, or its checkpoints are damaged. Move it away, or put "
        "what tells the jobs apart into hydra.sweep.subdir"
    )


def _has_ended(folder: Path, recipe: DictConfig) -> bool:
    """Return whether a completed run, if it is continued, has nothing to do by early stopping."""
    last = _last_checkpoint(folder)
    if last is None or last.get("recipe") != resume_fingerprint(recipe):
        return False
    try:
        rows = read_rows(folder / METRICS)
    except (OSError, DamagedFileError):
        return False  # the run itself says so
    if not rows or rows[-1]["round"] > int(recipe.rounds):
        return False
    stopping = EarlyStopping(**plain_part(recipe, "early_stopping"))
    return why_ended(rows, recipe.target_accuracy, stopping) is not None


def make_ready(folder: Path, plan: Plan) -> None:
    """Empty a job's folder for a restart, except its log."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir() if plan is Plan.RESTART else ():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOG:
            path.unlink()


def _with_absolute_paths(recipe: DictConfig) -> DictConfig:
    """Return the recipe with the files of its hash as the apps know them, by absolute paths."""
    recipe = recipe.copy()
    for key in HASHED_PATHS:
        path = OmegaConf.select(recipe, key)
        if isinstance(path, str) and path:
            OmegaConf.update(recipe, key, str(Path(path).expanduser().absolute()))
    return recipe


def _last_checkpoint(folder: Path) -> Mapping[str, Any] | None:
    """Return the label of the last whole checkpoint, without importing torch.

    None without a checkpoint; empty if all are damaged.
    """
    found = sorted((folder / "checkpoints").glob("round-*.safetensors"))
    for path in reversed(found):
        with contextlib.suppress(DamagedFileError):
            return read_label(path)
    return {} if found else None
