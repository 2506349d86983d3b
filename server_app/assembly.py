"""Builds a recipe's strategy and checks the recipe before round 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING

from flwr.common.logger import log
from omegaconf import DictConfig
from torch import nn

from fedhet.common.errors import ConfigError
from fedhet.common.metrics import (
    is_own,
    measured_names,
    own_names,
    require_metrics,
    row_key,
)
from fedhet.conf import (
    build_local_optimizer,
    build_part,
    check_loggers,
    fingerprint,
    method_name,
    plain_part,
)
from fedhet.conf.build import strategy_of, strategy_parts
from fedhet.conf.metrics import hides_scores
from fedhet.server_app.initial_model import initial_model_file
from fedhet.strategies.attacks.labels import Backdoor
from fedhet.strategies.base import ClientSide, LocalOptimizer
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import local_training_config
from fedhet.strategies.components.samplers import most_clients
from fedhet.strategies.components.tensor_selection import (
    TensorSelector,
    personal_names,
    trainable_shared,
)
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.modes.robust.aggregator import RobustAggregator
from fedhet.strategies.modes.robust.fltrust import FLTrust, RootTraining
from fedhet.strategies.parts import Setup
from fedhet.strategies.round.checks import check_sides, sides_with
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.round.registration import FROZEN_MODEL, FederationConfig
from fedhet.strategies.round.server_model import BuildsOutputModel, ServerModel
from fedhet.strategies.slots import Observer, Output
from fedhet.strategies.wire.records import COLUMNS
from fedhet.tasks import AnyTask, Functions, TableTask, Task, build_task
from fedhet.tasks.config import OwnConfig, read_config
from fedhet.tasks.conformal.calibration import Calibration
from fedhet.tasks.evaluation import classifies
from fedhet.tasks.models.own_weights import frozen_sha256
from fedhet.tasks.own_data import refuse_unread_partition
from fedhet.tasks.own_metric import OwnMetric
from fedhet.tasks.partitions import PartitionConfig
from fedhet.tasks.pixels import black_and_white
from fedhet.tasks.task import kind_of

_PARTS = ("schedule", "attack", "system")


def check_parts(recipe: DictConfig) -> None:
    """Refuse what the constructors of a recipe's parts refuse, before loading model and data."""
    task = read_config(plain_part(recipe, "task"))
    size, name = task.num_classes or 0, f"task={task.name}"
    require_metrics(recipe.evaluation.metrics, kind_of(task), size, name)
    for word in filter(is_own, recipe.evaluation.metrics):
        OwnMetric(word)
    PartitionConfig.from_mapping(plain_part(recipe, "partition"))
    local_training_config(recipe.local, recipe.strategy.phases)
    build_local_optimizer(recipe, classifier_tensors=1)
    for key in _PARTS:
        build_part(recipe, key, classifier_tensors=1)
    parts = strategy_parts(recipe, classifier_tensors=1)
    stacked = bool(recipe.strategy.allow_stacked_corrections)
    check_sides(parts.client_sides, parts.server_sides, allow_stacked=stacked)
    _check_kind(recipe, kind_of(task), parts.client_sides)
    _check_cohort(recipe)
    check_loggers(recipe.logger)
    if recipe.runtime.simulation and not recipe.resume:  # else the file may be elsewhere, or gone
        initial_model_file(recipe)


def task_of(
    recipe: DictConfig, functions: Functions | None = None, columns: str | None = None
) -> AnyTask:
    """Return the recipe's task as the server has it; see ``build_task``."""
    return build_task(
        plain_part(recipe, "task"),
        plain_part(recipe, "partition"),
        seed=int(recipe.seed),
        num_clients=int(recipe.clients) or 1,
        functions=functions,
        columns=columns,
    )


def check_words(
    recipe: DictConfig, words: Sequence[str], functions: Functions | None = None
) -> None:
    """Refuse overrides that the user's functions leave without effect."""
    task = read_config(plain_part(recipe, "task"))
    if isinstance(task, OwnConfig):
        refuse_unread_partition((functions or Functions.of(task)).data, words)


def _check_cohort(recipe: DictConfig) -> None:
    """Refuse rounds with fewer clients than the aggregator needs, if the recipe says how many."""
    aggregator = build_part(recipe, "strategy.aggregator", classifier_tensors=1)
    if isinstance(aggregator, RobustAggregator) and recipe.clients:
        sampler = build_part(recipe, "strategy.sampler", classifier_tensors=1)
        clients = int(recipe.clients) - len(recipe.partition.get("unseen", ()))
        aggregator.check_cohort(clients, most_clients(sampler, clients))


def calibration_of(
    recipe: DictConfig, model: nn.Module, output: Output, sides: Mapping[str, ClientSide]
) -> Calibration:
    """Return the recipe's calibration, refused if the clients cannot calibrate, or must not."""
    found = Calibration(**plain_part(recipe, "calibration"))
    asked = {}  # what clients are asked after the last round, and the word that turns it off
    if found.alphas:
        asked[f"calibration.alphas={list(found.alphas)}: "] = "calibration.alphas=[]"
    if recipe.evaluation.confusion:
        asked["evaluation.confusion=true: "] = "evaluation.confusion=false"
    for start, off in asked.items():
        if not classifies(model):
            raise ConfigError(
                f"{start}task.model={recipe.task.model} has no classes (a regression has none): "
                f"set {off}"
            )
        if isinstance(output, BuildsOutputModel):
            raise ConfigError(
                f"{start}strategy={method_name(recipe)} gives out another network than the "
                f"clients'; set {off}"
            )
        kept = personal_names(model, TensorSelector(recipe.strategy.personal))
        if recipe.evaluation.model == "clients" and (sides_with("own_model", sides) or not kept):
            raise ConfigError(
                f"{start}clients use the shared model, but strategy={method_name(recipe)} "
                "scores the clients' own models (evaluation.model=clients): set "
                f"evaluation.model=global, or {off}"
            )
    return found


def backdoor_of(recipe: DictConfig, server_model: ServerModel) -> Backdoor | None:
    """Return the recipe's backdoor attack, to measure its success; None if it has none."""
    attack = build_part(recipe, "attack", classifier_tensors=0)
    if not isinstance(attack, Backdoor):
        return None
    attack.white = server_model.white
    return attack


def client_metrics_of(recipe: DictConfig, task: AnyTask) -> ClientMetrics:
    """Return the metrics that clients may report."""
    evaluation = recipe.evaluation
    classes = task.class_names if evaluation.metrics and evaluation.per_class else ()
    names = measured_names(evaluation.metrics, classes)
    return ClientMetrics(tuple(names), per_client=bool(evaluation.per_client))


def server_model_of(task: AnyTask, model: nn.Module) -> ServerModel:
    """Return the task's model for the parts of a strategy that run it."""
    black, white = black_and_white(task, next(model.parameters()).device)
    shape = task.input_shape if isinstance(task, Task) else tuple(task.config.input_shape or ())
    return ServerModel(model, shape, task.num_classes, black, white)


def _check_kind(recipe: DictConfig, kind: str | None, sides: Mapping[str, ClientSide]) -> None:
    """Refuse methods that work by class if the task has no classes."""
    if kind in (None, "classification"):
        return
    if any(side.by_class for side in sides.values()):
        raise ConfigError(
            f"strategy={method_name(recipe)} works by class, and task.kind={kind} has no classes: "
            "choose another strategy"
        )


def _check_own_names(recipe: DictConfig, sides: Mapping[str, ClientSide]) -> None:
    """Refuse a metric of the user's own with the name of a column that the method brings."""
    columns = {row_key(name) for side in sides.values() for name in side.measures}
    if both := sorted(columns.intersection(own_names(recipe.evaluation.metrics))):
        raise ConfigError(
            f"evaluation.metrics: rows of strategy={method_name(recipe)} have {both[0]} already, "
            "and a metric has its function's name; rename the function"
        )


def federation_of(recipe: DictConfig) -> FederationConfig:
    """Return how many clients a recipe has and needs, and the hashes that they must share."""
    return FederationConfig(
        num_clients=int(recipe.clients),
        min_clients=recipe.runtime.min_clients,
        min_replies=recipe.min_replies,
        max_failed_rounds=recipe.max_failed_rounds,
        connect_timeout_seconds=float(recipe.runtime.connect_timeout_seconds),
        nodes_may_join=not recipe.runtime.simulation,
        fingerprint=fingerprint(recipe),
    )


def evaluates_at_clients(recipe: DictConfig, *, has_test: bool) -> bool:
    """Return whether all clients evaluate the model, as they do for a server without examples.

    If privacy hides their scores from the server, nobody evaluates the model by default.
    """
    if recipe.evaluation.clients or has_test:
        return bool(recipe.evaluation.clients)
    if (private := hides_scores(recipe.strategy)) is None:
        log(INFO, "The server has no test examples: the clients evaluate the model on theirs")
        return True
    log(
        INFO,
        "The server has no test examples, and %s hides the clients' scores: nobody evaluates the "
        "model",
        private,
    )
    return False


def build_strategy(
    recipe: DictConfig,
    task: AnyTask,
    server_model: ServerModel,
    observers: Sequence[Observer] = (),
    *,
    root: RootTraining | None = None,
    evaluate_on_clients: bool,
) -> FederatedStrategy:
    """Assemble the recipe's strategy; both halves are checked against each other and the model.

    ``root`` is how the server trains under FLTrust.
    """
    model, tensors = server_model.model, task.classifier_tensors
    parts = strategy_parts(recipe, tensors)
    _check_kind(recipe, kind_of(task.config), parts.client_sides)
    _check_own_names(recipe, parts.client_sides)
    optimizer = build_local_optimizer(recipe, tensors)
    shared = trainable_shared(model, TensorSelector(recipe.strategy.personal))
    for name, side in parts.client_sides.items():
        side.check(model, optimizer, shared)
        if side.plain_steps and not _steps_plainly(optimizer, shared, recipe.local.clip):
            text = (
                "strategy=%s moves %s by plain SGD steps of local.lr, whatever the optimizer is, "
                "and without local.weight_decay and local.clip"
            )
            log(WARNING, text, name, side.plain_steps)
    local_training = local_training_config(recipe.local, recipe.strategy.phases)
    if (attack := build_part(recipe, "attack", tensors)) is not None:
        attack.white = server_model.white
        sent = {name for side in parts.client_sides.values() for name in side.sends}
        classifies = kind_of(task.config) == "classification"
        attack.check_method(sent, num_classes=task.num_classes if classifies else 0)
    federation, frozen = federation_of(recipe), frozen_sha256(model)
    node_settings = {COLUMNS: task.columns} if isinstance(task, TableTask) and task.columns else {}
    setup = Setup(
        local_lr=recipe.local.lr,
        schedule=build_part(recipe, "schedule", tensors),
        local_training=local_training,
        server_model=server_model,
        buffers=[name for name, _ in model.named_buffers()],
        federation=replace(
            federation,
            unseen=task.unseen_clients(),
            fingerprint={**federation.fingerprint, **({FROZEN_MODEL: frozen} if frozen else {})},
            node_settings=node_settings,
        ),
        system=build_part(recipe, "system", tensors),
        observers=observers,
        client_metrics=replace(client_metrics_of(recipe, task), asked=evaluate_on_clients),
        allow_stacked_corrections=bool(recipe.strategy.allow_stacked_corrections),
    )
    strategy = strategy_of(recipe, tensors, setup)
    if isinstance(strategy.server_step.aggregator, FLTrust):
        strategy.server_step.aggregator.train = root
    return strategy


def _steps_plainly(optimizer: LocalOptimizer, shared: Sequence[str], clip: float | None) -> bool:
    """Return whether a local step is a plain one of SGD: no momentum, decay or clipping."""
    plain = type(optimizer) is SGD and not optimizer.weight_decay
    return plain and clip is None and not optimizer.stateful(shared)
