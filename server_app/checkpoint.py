"""Checkpoints: one safetensors file a round with everything needed to resume after it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from strategies.base import Tensors
from strategies.round.round_report import StrategyState
from strategies.round.tensor_files import below, save_tensors

_KEPT = 2  # the last one, and one more in case the disk fails under it
_PLAIN = ("round", "experiment", "failed_rounds", "restarted")  # of the state
_BY_CLIENT = ("committed", "personal")  # JSON has no whole numbers as keys


@dataclass(frozen=True)
class Checkpoint:
    """The params after ``state.round``, the strategy's state, and the recipe's hash."""

    params: Tensors
    state: StrategyState
    recipe: str


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically and delete all but the last two."""
    folder.mkdir(parents=True, exist_ok=True)
    state = checkpoint.state
    tensors = {f"params/{name}": value for name, value in checkpoint.params.items()}
    for group, values in state.tensors.items():
        tensors |= {f"state/{group}/{name}": value for name, value in values.items()}
    about = {key: getattr(state, key) for key in (*_PLAIN, *_BY_CLIENT)}
    about |= {"groups": sorted(state.tensors), "recipe": checkpoint.recipe}
    path = folder / f"round-{state.round:06d}.safetensors"
    save_tensors(path, tensors, {"fedhet": json.dumps(about)})
    for old in checkpoints(folder)[:-_KEPT]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, oldest first."""
    return sorted(folder.glob("round-*.safetensors"))


def load_checkpoint(path: Path, order: Sequence[str]) -> Checkpoint:
    """Read a checkpoint whose params are those of ``order``; the file does not keep their order."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["fedhet"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}
    params = below("params/", tensors)
    if set(params) != set(order):
        raise ValueError(
            f"{path} holds other tensors than the model: {sorted(set(params) ^ set(order))}; "
            "resume with the task.model that wrote it"
        )
    kept: dict[str, Any] = {key: about[key] for key in _PLAIN}
    kept |= {key: {int(c): value for c, value in about[key].items()} for key in _BY_CLIENT}
    groups = {group: below(f"state/{group}/", tensors) for group in about["groups"]}
    state = StrategyState(**kept, tensors=groups)
    return Checkpoint({name: params[name] for name in order}, state, about["recipe"])
