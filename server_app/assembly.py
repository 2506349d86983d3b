"""The recipe's parts put together, each checked before round 1."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig
from torch import nn

from common.errors import ConfigError, require_range, require_whole
from conf import (
    build_local_optimizer,
    build_part,
    check_requirements,
    check_slots,
    check_switches,
    fingerprint,
    method_name,
    plain_part,
)
from server_app.calibration import Calibration
from strategies.base import Observer, Output, ReplyTransform
from strategies.components.local_training_config import local_training_config
from strategies.components.tensor_selection import TensorSelector, trainable_shared
from strategies.round.federated import FederatedStrategy
from strategies.round.server_network import GivesNetwork, Network
from tasks import Task
from tasks.evaluation import classifies
from tasks.transform import Transform

EVALUATED = ("global", "clients", "both")


def check_recipe(recipe: DictConfig) -> None:
    """Refuse values that no method can run with."""
    check_slots(recipe)
    check_requirements(recipe)
    check_switches(recipe)
    require_whole("seed", recipe.seed)
    require_whole("rounds", recipe.rounds, low=1)
    require_whole("clients", recipe.clients)
    require_whole("evaluation.every", recipe.evaluation.every)
    require_whole("checkpoint.every", recipe.checkpoint.every)
    local_training_config(recipe.local, recipe.strategy.phases)
    require_whole("evaluation.finetune_epochs", recipe.evaluation.finetune_epochs)
    for name in ("round_timeout_seconds", "connect_timeout_seconds"):
        require_range(f"runtime.{name}", recipe.runtime[name], open_low=True)
    if recipe.evaluation.model not in EVALUATED:
        raise ConfigError(
            f"evaluation.model={recipe.evaluation.model!r} is not allowed: it must be one of "
            f"{', '.join(EVALUATED)}"
        )
    if recipe.target_accuracy is not None:
        require_range("target_accuracy", recipe.target_accuracy, high=1.0)
        if recipe.evaluation.every == 0:
            raise ConfigError(
                f"target_accuracy={recipe.target_accuracy} is checked at evaluations, but "
                "evaluation.every=0 has none before the end; set evaluation.every to 1 or more"
            )


def calibration_of(recipe: DictConfig, model: nn.Module, output: Output) -> Calibration:
    """Return the recipe's calibration, which is none without alphas.

    Raises:
        ConfigError: if the clients can or may not do it.
    """
    found = Calibration(**plain_part(recipe, "calibration"))
    if not found.alphas:
        return found
    start = f"calibration.alphas={list(found.alphas)}: "
    if not recipe.partition.holdout:
        raise ConfigError(
            f"{start}clients calibrate on what they hold out, and partition.holdout="
            f"{recipe.partition.holdout} is nothing; set it to 0.1, or calibration.alphas=[]"
        )
    for group in ("secure_aggregation", "differential_privacy"):
        if recipe.strategy.get(group):
            raise ConfigError(
                f"{start}every client's histogram is sent as it is, which strategy/{group} is to "
                f"prevent; set calibration.alphas=[], or strategy/{group}=none"
            )
    if not classifies(model):
        raise ConfigError(f"{start}task.model={recipe.task.model} does not classify")
    if isinstance(output, GivesNetwork):
        raise ConfigError(
            f"{start}strategy={method_name(recipe)} gives out another network than the clients'; "
            "set calibration.alphas=[]"
        )
    return found


def network_of(task: Task, model: nn.Module) -> Network:
    """Return what a strategy may know of the task's network."""
    black = white = None
    if isinstance(task.config.transform, Transform):
        scale, black = task.config.transform.constants(next(model.parameters()).device)
        white = 255 * scale + black
    return Network(model, task.input_shape, task.num_classes, black, white)


def build_strategy(
    recipe: DictConfig,
    task: Task,
    network: Network,
    first: Sequence[ReplyTransform] = (),
    observers: Sequence[Observer] = (),
) -> FederatedStrategy:
    """Assemble the recipe's strategy; both halves are checked against each other and the model.

    Args:
        recipe: composed.
        task: of the recipe.
        network: its network.
        first: sees the replies as they came, before the recipe's own transforms.
        observers: see every round.
    """
    model, tensors = network.model, task.classifier_tensors
    client_sides = build_part(recipe, "strategy.client_sides", tensors)
    optimizer = build_local_optimizer(recipe, tensors)
    shared = trainable_shared(model, TensorSelector(recipe.strategy.personal))
    for side in client_sides.values():
        side.check(model, optimizer, shared)
    for phase in local_training_config(recipe.local, recipe.strategy.phases).phases:
        phase.layers.select(name for name, _ in model.named_parameters())
    transforms = build_part(recipe, "strategy.transforms", tensors)
    return FederatedStrategy(
        client_sides=client_sides,
        server_sides=build_part(recipe, "strategy.server_sides", tensors),
        aggregator=build_part(recipe, "strategy.aggregator", tensors),
        server_optimizer=build_part(recipe, "strategy.server_optimizer", tensors),
        output=build_part(recipe, "strategy.output", tensors),
        network=network,
        sampler=build_part(recipe, "strategy.sampler", tensors),
        transforms=[*first, *(transforms[name] for name in sorted(transforms))],
        observers=observers,
        schedule=build_part(recipe, "schedule", tensors),
        local_lr=recipe.local.lr,
        buffers=[name for name, _ in model.named_buffers()],
        num_clients=int(recipe.clients),
        min_clients=recipe.runtime.min_clients,
        min_replies=recipe.min_replies,
        max_failed_rounds=recipe.max_failed_rounds,
        fingerprint=fingerprint(recipe),
        evaluate_on_clients=bool(recipe.evaluation.clients),
        connect_timeout_seconds=float(recipe.runtime.connect_timeout_seconds),
        secure_aggregation=build_part(recipe, "strategy.secure_aggregation", tensors),
        allow_stacked_corrections=bool(recipe.strategy.allow_stacked_corrections),
    )
