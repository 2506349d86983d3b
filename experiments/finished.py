"""A finished run's task, and its model, made again from its results directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from safetensors.torch import load_file
from torch import nn

from tasks import ConfigError, Task, build_task, pick_device
from tasks.evaluation import classifies

MODEL = "model.safetensors"


def recipe_of(folder: Path) -> DictConfig:
    """Return the recipe that a run has written."""
    recipe = OmegaConf.load(folder / "config.yaml")
    assert isinstance(recipe, DictConfig)
    return recipe


def task_of(recipe: DictConfig) -> Task:
    """Return the task of a run's recipe."""
    plain: Any = OmegaConf.to_container(recipe)
    plain["task"].pop("classifier_tensors", None)  # what the run knew of its model
    return build_task(
        plain["task"], plain["partition"], seed=plain["seed"], num_clients=plain["clients"]
    )


def classifier_of(folder: Path, task: Task) -> nn.Module:
    """Return the model that a run has given out, in eval mode, on the GPU where there is one.

    Raises:
        ConfigError: if there is none, or it is not the task's whole model, or no classifier.
    """
    path = folder / MODEL
    if not path.is_file():
        raise ConfigError(f"{folder} has no {MODEL}: the run has not completed")
    model = task.build_model(0)
    tensors = load_file(path)
    whole = {n for n, value in model.state_dict().items() if value.is_floating_point()}
    if tensors.keys() != whole:
        raise ConfigError(
            f"{path} is not the task's whole model (it differs in "
            f"{sorted(tensors.keys() ^ whole)[:3]}): its clients keep tensors of their own, or the "
            "run gives out another network"
        )
    if not classifies(model):
        raise ConfigError(f"{folder}: its model {task.config.model} does not classify")
    model.load_state_dict(tensors, strict=False)  # integer buffers are not given out
    return model.to(pick_device("auto")).eval()
