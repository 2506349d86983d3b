"""A finished run's task, and its model, made again from its results directory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from client_app.client import PERSONAL
from common.errors import ConfigError
from conf.renamed import upgrade_config
from strategies.components.tensor_selection import TensorSelector, personal_names
from tasks import Task, build_task, pick_device
from tasks.evaluation import classifies

MODEL = "model.safetensors"


def recipe_of(folder: Path) -> DictConfig:
    """Return the recipe that a run has written, with the keys of today.

    Raises:
        ConfigError: if there is none.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{folder} is no run's results directory: it has no config.yaml")
    plain = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(plain, dict)
    return OmegaConf.create(upgrade_config({str(key): value for key, value in plain.items()}))


def task_of(recipe: DictConfig, classes: Sequence[str] | None = None) -> Task:
    """Return the task of a run's recipe.

    Args:
        recipe: of the run.
        classes: their names by label, where neither recipe nor data folder may say them.
    """
    plain: Any = OmegaConf.to_container(recipe)
    plain["task"].pop("classifier_tensors", None)  # what the run knew of its model
    if classes is not None and plain["task"].get("classes") is None:
        plain["task"]["classes"] = list(classes)
    return build_task(
        plain["task"], plain["partition"], seed=plain["seed"], num_clients=plain["clients"]
    )


def meaning_of(folder: Path) -> dict[str, str]:
    """Return what the numbers of a run's model stand for (``Task.label_metadata``).

    It is empty for a run that has not written it.

    Raises:
        ConfigError: if the run has no model, or a broken one.
    """
    path = _model_path(folder)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return {key: metadata[key] for key in ("classes", "vocabulary") if key in metadata}


def classes_in(meaning: dict[str, str]) -> list[str] | None:
    """Return the names of the classes by label; None where they are not said."""
    return json.loads(meaning["classes"]) if "classes" in meaning else None


def classifier_of(folder: Path, task: Task, state: Path | None = None) -> nn.Module:
    """Return the model that a run has given out, in eval mode, on the GPU where there is one.

    Tensors that do not travel are the client's whose state is named; or else, where no client
    trains them (FedBABU), those that all were initialised with.

    Args:
        folder: the run's results directory.
        task: of the run.
        state: a file of a client's state.

    Raises:
        ConfigError: if there is none, or it is not the task's whole model, or no classifier.
    """
    path = _model_path(folder)
    model = task.build_model(task.seed)
    initial = {n: value for n, value in model.state_dict().items() if value.is_floating_point()}
    whole = {name: value.shape for name, value in initial.items()}
    tensors = _tensors_in(path)
    if state is not None:
        tensors |= _personal_tensors(state)
    else:
        tensors |= {name: initial[name] for name in _never_trained(recipe_of(folder), model)}
    found = {name: value.shape for name, value in tensors.items()}
    if found != whole:
        differ = {name for name, _ in found.items() ^ whole.items()}
        raise ConfigError(
            f"{path} is not the task's whole model (it differs in {sorted(differ)[:3]}): its "
            "clients keep tensors of their own (--state names a client's), or the run gives out "
            "another network, or the task is another"
        )
    if not classifies(model):
        raise ConfigError(f"{folder}: its model {task.config.model} does not classify")
    model.load_state_dict(tensors, strict=False)  # integer buffers are not given out
    return model.to(pick_device("auto")).eval()


def _personal_tensors(path: Path) -> dict[str, Tensor]:
    """Return what a client keeps of its model; the files are those of client_app/state.py."""
    stored = _tensors_in(path, "--state ")
    start = f"{PERSONAL}/"
    found = {
        name.removeprefix(start): value for name, value in stored.items() if name.startswith(start)
    }
    if not found:
        raise ConfigError(f"--state {path} has no tensors that only its client has")
    return found


def _never_trained(recipe: DictConfig, model: nn.Module) -> set[str]:
    """Return the tensors that do not travel and are in no phase of training: initial for ever."""
    phases = recipe.strategy.phases
    if not phases:
        return set()
    names = [name for name, _ in model.named_parameters()]
    trained = {name for phase in phases for name in TensorSelector(phase.layers).select(names)}
    return set(personal_names(model, TensorSelector(recipe.strategy.personal))) - trained


def _tensors_in(path: Path, option: str = "") -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{option}{path} cannot be read: {error}") from None


def _model_path(folder: Path) -> Path:
    path = folder / MODEL
    if not path.is_file():
        raise ConfigError(f"{folder} has no {MODEL}: the run has not completed")
    return path
