"""Loads the task and the model of a finished run from its results directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from client_app.client import PERSONAL
from common.errors import ConfigError
from conf.renamed import upgrade_config
from strategies.components.tensor_selection import TensorSelector, personal_names
from tasks import Task, build_task, pick_device
from tasks.evaluation import classifies

MODEL = "model.safetensors"


def recipe_of(folder: Path) -> DictConfig:
    """Return the recipe that a run has written, with the keys of today."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is not the results directory of a run: it has no config.yaml")
    plain = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(plain, dict)
    return OmegaConf.create(upgrade_config({str(key): value for key, value in plain.items()}))


def task_of(recipe: DictConfig, metadata: Mapping[str, str] | None = None) -> Task:
    """Return the task of a run's recipe; ``metadata`` names its classes if the recipe does not."""
    plain: Any = OmegaConf.to_container(recipe)
    plain["task"].pop("classifier_tensors", None)  # the run has added it
    if metadata and "classes" in metadata and plain["task"].get("classes") is None:
        plain["task"]["classes"] = json.loads(metadata["classes"])
    return build_task(
        plain["task"], plain["partition"], seed=plain["seed"], num_clients=plain["clients"]
    )


def label_metadata_of(folder: Path) -> dict[str, str]:
    """Return the label metadata stored with a run's model (``Task.label_metadata``), if any."""
    _, metadata = _read(_model_path(folder))
    return {key: metadata[key] for key in ("classes", "vocabulary") if key in metadata}


def classifier_of(folder: Path, task: Task, state: Path | None = None) -> nn.Module:
    """Return a run's output model in eval mode, on the GPU if there is one.

    Tensors that do not travel come from a client's state file, if one is named. Otherwise those
    that no client trains (FedBABU) have their initial values.
    """
    path = _model_path(folder)
    model = task.build_model(task.seed)
    initial = {n: value for n, value in model.state_dict().items() if value.is_floating_point()}
    tensors, _ = _read(path)
    if state is not None:
        tensors |= _personal_tensors(state)
    else:
        tensors |= {name: initial[name] for name in _never_trained(recipe_of(folder), model)}
    whole, found = (
        {(name, value.shape) for name, value in part.items()} for part in (initial, tensors)
    )
    if found != whole:
        differ = sorted({name for name, _ in found ^ whole})
        raise ConfigError(
            f"{path} is not the task's whole model (it differs in {differ[:3]}): its clients keep "
            "tensors of their own (--state names a client's), or the run's output is another "
            "network, or the task is another"
        )
    if not classifies(model):
        raise ConfigError(f"{folder}: its model {task.config.model} is not a classifier")
    model.load_state_dict(tensors, strict=False)  # integer buffers are not stored
    return model.to(pick_device("auto")).eval()


def _personal_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors that a client keeps, from a file of client_app/state.py."""
    stored, _ = _read(path, "--state ")
    start = f"{PERSONAL}/"
    found = {
        name.removeprefix(start): value for name, value in stored.items() if name.startswith(start)
    }
    if not found:
        raise ConfigError(f"--state {path} has no tensors that only its client keeps")
    return found


def _never_trained(recipe: DictConfig, model: nn.Module) -> set[str]:
    """Return the tensors that neither travel nor are trained in any phase."""
    phases = recipe.strategy.phases
    if not phases:
        return set()
    names = [name for name, _ in model.named_parameters()]
    trained = {name for phase in phases for name in TensorSelector(phase.layers).select(names)}
    return set(personal_names(model, TensorSelector(recipe.strategy.personal))) - trained


def _read(path: Path, option: str = "") -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{option}{path} cannot be read: {error}") from None


def _model_path(folder: Path) -> Path:
    path = folder / MODEL
    if not path.is_file():
        raise ConfigError(f"{folder} has no {MODEL}: the run has not completed")
    return path
