"""Checkpoints: one safetensors file a round with everything needed to resume after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedhet.common.checksums import CHECKPOINT
from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.results import METRICS, Row, read_rows, rows_sha256
from fedhet.strategies.base import Tensors
from fedhet.strategies.round.round_report import StrategyState
from fedhet.strategies.wire.tensor_files import below, load_tensors, save_tensors

_KEPT = 2  # the last one, and one more in case the disk fails under it
_PLAIN = ("round", "experiment", "failed_rounds", "restarted", "clock", "in_flight", "spoilers")
_ABOUT = ("recipe", "rows", "data", "made_by")  # of a checkpoint, beside its tensors and its state
_BY_CLIENT = ("committed", "personal", "durable")  # JSON has no whole numbers as keys


@dataclass(frozen=True)
class RunOrigin:
    """What a run's checkpoints belong to."""

    recipe: str  # its hash
    data: dict[str, str]  # the hashes of the examples, by split
    made_by: Mapping[str, str]  # the code's hash, packages' versions


@dataclass(frozen=True)
class Checkpoint:
    """The params after ``state.round``, the strategy's state, and what they belong to."""

    params: Tensors
    state: StrategyState
    recipe: str  # its hash
    rows: str | None = None  # the hash of metrics.jsonl up to the round
    data: Mapping[str, str] = field(default_factory=dict)  # the hashes of the examples, by split
    made_by: Mapping[str, str] = field(default_factory=dict)  # the code's hash, packages' versions


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically and delete all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    state = checkpoint.state
    tensors = {f"params/{name}": value for name, value in checkpoint.params.items()}
    for group, values in state.tensors.items():
        tensors |= {f"state/{group}/{name}": value for name, value in values.items()}
    label: dict[str, Any] = {"kind": CHECKPOINT, "run": state.experiment}
    label |= {key: getattr(state, key) for key in (*_PLAIN, *_BY_CLIENT)}
    label |= {key: getattr(checkpoint, key) for key in _ABOUT}
    label["groups"] = sorted(state.tensors)
    path = folder / f"round-{state.round:06d}.safetensors"
    save_tensors(path, tensors, label)
    for old in checkpoints(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    return sorted(folder.glob("round-*.safetensors"))


def last_whole_checkpoint(folder: Path) -> Path | None:
    """Return a run's newest checkpoint that is whole and fits its metrics.jsonl; None without any.

    Raises:
        DamagedFileError: if metrics.jsonl is damaged, or all checkpoints are.
    """
    found = checkpoints(folder / "checkpoints")
    metrics = folder / METRICS
    if found and not metrics.exists():
        log(WARNING, "%s is missing: the figures of the rounds that are done are lost", metrics)
    rows = read_rows(metrics) if found and metrics.exists() else None
    problems: list[str] = []
    for path in reversed(found):
        try:
            _check(path, rows, metrics)
        except DamagedFileError as error:
            problems.append(str(error))
        else:
            for problem in problems:
                log(WARNING, "%s: %s is used in its place", problem, path.name)
            return path
    if problems:
        raise DamagedFileError(
            f"{'; '.join(problems)}. No checkpoint of {folder} can be used: bring the files back "
            "from a copy, or start again in another results_dir"
        )
    return None


def _check(path: Path, rows: list[Row] | None, metrics: Path) -> None:
    digits = path.stem.removeprefix("round-")
    if not digits.isdigit():
        raise DamagedFileError(f"{path} is no checkpoint")
    round = int(digits)
    _, _, label = load_tensors(path, kind=CHECKPOINT, round=round)
    if rows is None:
        return
    if rows_sha256([row for row in rows if row["round"] <= round]) != label.get("rows"):
        raise DamagedFileError(
            f"{metrics} is damaged or of another run: its rows up to round {round} are not those "
            f"that {path} was written with (delete {metrics.name} to continue without its rows)"
        )


def load_checkpoint(path: Path, order: Sequence[str]) -> Checkpoint:
    """Read a checkpoint with the params in ``order``, because the file does not keep the order.

    Raises:
        DamagedFileError: if the file is damaged, or no checkpoint.
        ConfigError: if it holds another model.
    """
    tensors, _, label = load_tensors(path, kind=CHECKPOINT)
    params = below("params/", tensors)
    if set(params) != set(order):
        raise ConfigError(
            f"{path} holds other tensors than the model: {sorted(set(params) ^ set(order))}; "
            "resume with the task.model that wrote it"
        )
    try:
        kept: dict[str, Any] = {key: label[key] for key in _PLAIN}
        for key in _BY_CLIENT:
            kept[key] = {int(client): value for client, value in label[key].items()}
        groups = {group: below(f"state/{group}/", tensors) for group in label["groups"]}
        state = StrategyState(**kept, tensors=groups)
        about = {key: label[key] for key in _ABOUT}
    except (KeyError, ValueError, AttributeError):
        raise DamagedFileError(f"{path} is not a checkpoint of this version") from None
    return Checkpoint({name: params[name] for name in order}, state, **about)
