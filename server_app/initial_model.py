"""The trained model that a run starts from (``initial_model``), in place of the seed's.

Only the server reads it: the clients get what travels with the first round. What they keep for
themselves (``strategy.personal``) begins as the seed gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from flwr.common.logger import log
from omegaconf import DictConfig
from torch import Tensor, nn

from fedhet.common.checksums import MODEL, file_sha256
from fedhet.common.errors import ConfigError
from fedhet.common.files import expanded
from fedhet.strategies.components.tensor_selection import TensorSelector, personal_names, tensors_of
from fedhet.strategies.round.tensor_files import load_tensors
from fedhet.tasks import AnyTask
from fedhet.tasks.models.own_weights import frozen_sha256
from fedhet.tasks.models.wrapped import WrappedModel, own_name

KEY = "initial_model"
_PATH = f"{KEY}.path"
_FILE = "model.safetensors"
_PICKLED = (".pt", ".pth")
_SHOWN = 3  # tensors in an error


def initial_model_file(recipe: DictConfig) -> Path | None:
    """Return the file of the recipe's initial model; None without one.

    Raises:
        ConfigError: if there is none at the path, or it is of another kind.
    """
    if not recipe[KEY].path:
        return None
    path = expanded(recipe[KEY].path, _PATH)
    file = path / _FILE if path.is_dir() else path
    if not file.is_file():
        where = f"the folder has no {_FILE}" if path.is_dir() else "there is no such file here"
        raise ConfigError(
            f"{_PATH}={path}: {where}; name the folder of a completed run, or a file that the "
            "server can read"
        )
    if file.suffix not in (".safetensors", *_PICKLED):
        raise ConfigError(
            f"{_PATH}={path}: a model is a .safetensors file, or a state_dict that torch.save has "
            "written as .pt or .pth"
        )
    return file


def load_initial_model(
    recipe: DictConfig, task: AnyTask, model: nn.Module, shared: Sequence[str]
) -> dict[str, Any]:
    """Put the tensors of the recipe's initial model into ``model``.

    Args:
        recipe: of the run.
        task: whose labels those of the file are compared with.
        model: as the seed gives it.
        shared: the names that travel; no other tensor is taken.

    Returns:
        What the data of the run's summary.json says of it; empty without one.

    Raises:
        ConfigError: if the file lacks a tensor, or has one of another shape or with NaN.
    """
    file = initial_model_file(recipe)
    if file is None:
        return {}
    layers = TensorSelector(recipe[KEY].layers, f"{KEY}.layers")
    chosen = set(personal_names(model, layers))
    wanted = [name for name in shared if name in chosen]
    if not wanted:
        raise ConfigError(
            f"{_PATH}={file}: of the tensors that {layers.key}={layers.spec} names, none travels "
            f"(strategy.personal={recipe.strategy.personal}), so that it would have no effect"
        )
    found, metadata = _read(file)
    _check_labels(file, metadata, task, model)
    tensors = _fitting(file, found, model, wanted)
    model.load_state_dict(tensors, strict=False)
    rest = len(tensors_of(model)) - len(tensors)
    others = f"; the other {rest} are those of seed={recipe.seed}" if rest else ""
    log(INFO, "The initial model has %s tensors of %s%s", len(tensors), file, others)
    return {KEY: {"path": str(file), "sha256": file_sha256(file), "tensors": len(tensors)}}


def _read(file: Path) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Return the tensors of a file, and the metadata of one that a run has written."""
    if file.suffix not in _PICKLED:
        tensors, metadata, label = load_tensors(file)
        if label.get("kind", MODEL) != MODEL:
            raise ConfigError(
                f"{_PATH}={file} holds the {label['kind']} of a run, and no model: name its {_FILE}"
            )
        return tensors, metadata
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, UnpicklingError, ValueError, KeyError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{_PATH}={file} cannot be read as a state_dict: {reason}; write it by "
            "torch.save(model.state_dict(), ...)"
        ) from None
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise ConfigError(
            f"{_PATH}={file} holds no state_dict, which is tensors by name: write it by "
            "torch.save(model.state_dict(), ...)"
        )
    return content, {}


def _check_labels(file: Path, metadata: Mapping[str, str], task: AnyTask, model: nn.Module) -> None:
    """Refuse a model of other frozen weights, and warn of one of other labels or inputs."""
    if metadata.get("frozen_sha256") not in (None, frozen_sha256(model)):
        raise ConfigError(
            f"{_PATH}={file} was trained beside other frozen weights than task.model="
            f"{task.config.model} has here: use the same pretrained files"
        )
    ours = task.label_metadata()
    for name in sorted(ours.keys() & metadata.keys()):
        if ours[name] != metadata[name]:
            text = "%s was trained with other %s than those of this run: its tensors are taken as "
            text += "they are (initial_model.layers leaves some out)"
            log(WARNING, text, file, name)


def _fitting(
    file: Path, found: Mapping[str, Tensor], model: nn.Module, wanted: Sequence[str]
) -> dict[str, Tensor]:
    """Return the wanted tensors by the model's names; a file may have those of the user's own."""
    known, tensors = tensors_of(model), {}
    classifier = model.classifier if isinstance(model, WrappedModel) else None
    for name in wanted:
        theirs = name if classifier is None or name in found else own_name(name, classifier)
        if theirs in found:
            tensors[name] = found[theirs]
    lacks = [name for name in wanted if name not in tensors]
    shapes = [
        f"{name} is {tuple(value.shape)} there and {tuple(known[name].shape)} here"
        for name, value in tensors.items()
        if value.shape != known[name].shape
    ]
    shapes += [
        f"{name} is {value.dtype} there and {known[name].dtype} here"
        for name, value in tensors.items()
        if value.is_complex()  # none travels, and a conversion would drop its imaginary part
    ]
    tensors = {name: value.to(known[name].dtype) for name, value in tensors.items()}
    bad = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    reasons = [f"it lacks {', '.join(lacks[:_SHOWN])}"] if lacks else []
    reasons += [", ".join(shapes[:_SHOWN])] if shapes else []
    if reasons:
        raise ConfigError(
            f"{_PATH}={file} is not this run's model: {'; '.join(reasons)}. The file has "
            f"{', '.join(list(found)[:_SHOWN])}, ...; name those that fit in "
            f"{KEY}.layers, such as 'body.*'"
        )
    if bad:
        kind = known[bad[0]].dtype
        raise ConfigError(f"{_PATH}={file}: {', '.join(bad[:_SHOWN])} has NaN or Inf as {kind}")
    return tensors
