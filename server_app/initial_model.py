"""The trained model that a run starts from (``initial_model``), in place of the seed's.

Only the server reads it. The clients get what travels with every round, and what they keep for
themselves (``strategy.personal``) with each message until they have a state of their own.
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
from fedhet.strategies.base import Tensors
from fedhet.strategies.components.tensor_selection import (
    TensorSelector,
    fixed_names,
    personal_names,
    tensors_of,
)
from fedhet.strategies.wire.tensor_files import load_tensors, parameters_sha256
from fedhet.tasks import AnyTask
from fedhet.tasks.models.own_weights import frozen_sha256
from fedhet.tasks.models.wrapped import WrappedModel, own_name

KEY = "initial_model"
_PATH = f"{KEY}.path"
_FILE = "model.safetensors"
_PICKLED = (".pt", ".pth")
_SHOWN = 3  # tensors in an error
_FIXED = "fixed_sha256"  # in a model's metadata: the hash of what its run neither trained nor sent


def initial_model_file(recipe: DictConfig) -> Path | None:
    """Return the file of the recipe's initial model; None without one.

    Raises:
        ConfigError: if the path has no model, or a file of another kind.
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
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Put the tensors of the recipe's initial model into ``model``.

    Args:
        recipe: of the run.
        task: whose labels those of the file are compared with.
        model: as the seed gives it.
        shared: the names that travel.

    Returns:
        The entry in ``data`` of summary.json, and the values with which the clients' own tensors
        begin, as far as the file has them; both empty without an initial model.

    Raises:
        ConfigError: if the file lacks a tensor that travels, or has one of another shape or NaN.
    """
    file = initial_model_file(recipe)
    if file is None:
        return {}, {}
    layers = TensorSelector(recipe[KEY].layers, f"{KEY}.layers")
    chosen = set(personal_names(model, layers))
    fixed = fixed_tensors(recipe, model)
    wanted = [name for name in shared if name in chosen]
    personal = personal_names(model, TensorSelector(recipe.strategy.personal))
    own = [name for name in personal if name in chosen and name not in fixed]
    if not wanted and not own:
        raise ConfigError(
            f"{_PATH}={file} would have no effect: {layers.key}={layers.spec} names only tensors "
            f"that are not trained (strategy.personal={recipe.strategy.personal})"
        )
    found, metadata = _read(file)
    _check_labels(file, metadata, task, model)
    theirs = _by_our_names(found, model, [*fixed, *wanted, *own])
    if metadata.get(_FIXED) != parameters_sha256(fixed):
        here = {name: value for name, value in fixed.items() if name in chosen}
        _require_fixed(file, theirs, here, recipe)
    taken = {name: theirs[name] for name in (*wanted, *own) if name in theirs}
    tensors = _fitting(file, found, model, taken, wanted or own)
    model.load_state_dict(tensors, strict=False)
    rest = len(tensors_of(model)) - len(tensors)
    others = f"; the other {rest} come from seed={recipe.seed}" if rest else ""
    log(INFO, "The initial model has %s tensors of %s%s", len(tensors), file, others)
    kept = {name: tensors[name].contiguous() for name in own if name in tensors}
    return {KEY: {"path": str(file), "sha256": file_sha256(file), "tensors": len(tensors)}}, kept


def _read(file: Path) -> tuple[Mapping[str, Tensor], Mapping[str, str]]:
    """Return the tensors of a file, and the metadata of one that a run has written."""
    if file.suffix not in _PICKLED:
        tensors, metadata, label = load_tensors(file)
        if label.get("kind", MODEL) != MODEL:
            raise ConfigError(
                f"{_PATH}={file} holds a run's {label['kind']}, not a model: name the run's {_FILE}"
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
            f"{_PATH}={file} is not a state_dict, that is tensors by name: write it with "
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


def fixed_tensors(recipe: DictConfig, model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that neither travel nor are trained (FedBABU's head), by name."""
    trained = [phase.layers for phase in recipe.strategy.phases]
    names = fixed_names(model, recipe.strategy.personal, trained)
    return {name: tensors_of(model)[name] for name in names}


def fixed_metadata(recipe: DictConfig, model: nn.Module) -> dict[str, str]:
    """Return the metadata for these tensors, which the file of a run's model lacks."""
    fixed = fixed_tensors(recipe, model)
    return {_FIXED: parameters_sha256(fixed)} if fixed else {}


def _require_fixed(file: Path, found: Tensors, fixed: Tensors, recipe: DictConfig) -> None:
    """Refuse a file that has other values for tensors that stay as the seed gives them."""
    for name, value in fixed.items():
        if name not in found or not torch.equal(found[name], value.cpu()):
            raise ConfigError(
                f"{_PATH}={file}: this run neither trains nor sends {name}, which comes from "
                f"seed={recipe.seed} everywhere, but the file has "
                f"{'another' if name in found else 'none'}: set the seed of the run that wrote "
                f"it, or take only the other tensors ({KEY}.layers='body.*')"
            )


def _by_our_names(
    found: Mapping[str, Tensor], model: nn.Module, names: Sequence[str]
) -> dict[str, Tensor]:
    """Return a file's tensors by the model's names; a file may have the user's network's names."""
    classifier = model.classifier if isinstance(model, WrappedModel) else None
    theirs = {
        name: name if classifier is None or name in found else own_name(name, classifier)
        for name in names
    }
    return {name: found[there] for name, there in theirs.items() if there in found}


def _fitting(
    file: Path,
    found: Mapping[str, Tensor],
    model: nn.Module,
    tensors: Tensors,
    wanted: Sequence[str],
) -> dict[str, Tensor]:
    """Return the file's tensors in the model's types, if they are all that are wanted, and fit."""
    known = tensors_of(model)
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
    reasons = [f"it lacks {', '.join(lacks[:_SHOWN])}"] if lacks else []
    reasons += [", ".join(shapes[:_SHOWN])] if shapes else []
    if reasons:
        raise ConfigError(
            f"{_PATH}={file} is not this run's model: {'; '.join(reasons)}. The file has "
            f"{', '.join(list(found)[:_SHOWN])}, ...; name those that fit in "
            f"{KEY}.layers, such as 'body.*'"
        )
    tensors = {name: value.to(known[name].dtype) for name, value in tensors.items()}
    bad = [name for name, value in tensors.items() if not torch.isfinite(value).all()]
    if bad:
        kind = known[bad[0]].dtype
        raise ConfigError(f"{_PATH}={file}: {', '.join(bad[:_SHOWN])} has NaN or Inf as {kind}")
    return tensors
