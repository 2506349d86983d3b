"""The parts that a run is made of: its task, its model and its strategy."""

from __future__ import annotations

from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord
from flwr.common.logger import log
from omegaconf import DictConfig

from fedhet.common.checksums import text_sha256
from fedhet.common.errors import ConfigError
from fedhet.conf.build import with_norm_layers
from fedhet.server_app.assembly import (
    build_strategy,
    calibration_of,
    evaluates_at_clients,
    server_model_of,
    task_of,
)
from fedhet.server_app.evaluation import ServerEvaluation
from fedhet.server_app.initial_model import fixed_metadata, load_initial_model
from fedhet.server_app.listeners.best_model import check_measured
from fedhet.server_app.listeners.diagnostics import Recorder, observers_of
from fedhet.server_app.reused_training import check_reused_training
from fedhet.server_app.root_set import root_set_of
from fedhet.strategies.base import Tensors
from fedhet.strategies.components.tensor_selection import (
    TensorSelector,
    personal_names,
    shared_names,
)
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.round.client_snapshots import FILE, ClientSnapshots
from fedhet.strategies.wire.records import COLUMNS
from fedhet.tasks import (
    AnyTask,
    Functions,
    TableTask,
    keep_freed_memory,
    make_repeatable,
    pick_device,
)
from fedhet.tasks.conformal.calibration import Calibration
from fedhet.tasks.models.own_weights import model_metadata
from fedhet.tasks.models.wrapped import WrappedModel

STATES = "client_state"  # where the clients of a simulation store theirs, in the results directory


@dataclass
class RunParts:
    """What a run is made of."""

    task: AnyTask
    data: dict[str, Any]  # which data the run has, by split, as summary.json says it
    initial: Tensors  # the shared tensors, before round 1
    metadata: dict[str, str]  # of files with the model
    has_personal: bool  # whether clients keep tensors of the model to themselves
    strategy: FederatedStrategy
    evaluation: ServerEvaluation
    recorders: list[Recorder]  # of the diagnostics
    calibration: Calibration
    client_config: ConfigRecord  # what every client is told


def parts_of(
    recipe: DictConfig,
    folder: Path,
    functions: Functions | None,
    columns: str | None,
    *,
    resumed: bool,
) -> RunParts:
    """Build the parts of a recipe's run into ``folder``; see :class:`fedhet.server_app.run.Run`."""
    keep_freed_memory()
    torch.set_num_threads(1)  # idle threads of a pool would take the simulated clients' CPUs
    device = pick_device(recipe.device)
    make_repeatable(device)
    task = task_of(recipe, functions, columns)
    for line in table_lines(task):
        log(INFO, "%s", line)
    if reused := recipe.local.reuse_training:
        check_reused_training(recipe, Path(reused), task.classifier_tensors)
    model = task.build_model(int(recipe.seed)).to(device)
    metadata = {**task.label_metadata(), **model_metadata(model, task.config.lora)}
    channels_last = bool(recipe.runtime.channels_last) and not isinstance(model, WrappedModel)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    recipe = with_norm_layers(recipe, model)
    personal = TensorSelector(recipe.strategy.personal)
    names = shared_names(model, personal)
    about, kept = ({}, {}) if resumed else load_initial_model(recipe, task, model, names)
    server_model = server_model_of(task, model)
    test = task.test_data(device, channels_last=channels_last)
    root, test_data = root_set_of(recipe, task, model, test)
    at_server = test_data is not None or recipe.evaluation.model == "clients"
    check_measured(recipe, task.predictions, at_server=at_server)
    recorders = observers_of(recipe, folder, server_model, test_data)
    snapshots = [ClientSnapshots(folder / FILE)] if recipe.checkpoint.client_models else []
    strategy = build_strategy(
        recipe,
        task,
        server_model,
        [*snapshots, *recorders],
        root=root,
        evaluate_on_clients=_evaluates_at_clients(recipe, has_test=test is not None),
    )
    strategy.state.kept = kept
    state, step = model.state_dict(), strategy.server_step
    # the nodes of a deployment have training examples that a server may lack
    data = task.data_used(train=bool(recipe.runtime.simulation))
    data |= {} if columns is None else {"columns": {"sha256": text_sha256(columns)}}
    return RunParts(
        task=task,
        data=data | about,
        initial={name: state[name] for name in names},
        metadata=metadata | fixed_metadata(recipe, model),
        has_personal=bool(personal_names(model, personal)),
        strategy=strategy,
        evaluation=ServerEvaluation(recipe, task, names, server_model, test_data, strategy),
        recorders=recorders,
        calibration=calibration_of(recipe, model, step.output, strategy.client_sides),
        client_config=_client_config(recipe, folder, columns),
    )


def table_lines(task: AnyTask) -> list[str]:
    """Return how the task reads a table whose columns it has found out."""
    return task.about if isinstance(task, TableTask) else []


def _evaluates_at_clients(recipe: DictConfig, *, has_test: bool) -> bool:
    at_clients = evaluates_at_clients(recipe, has_test=has_test)
    if (epochs := recipe.evaluation.finetune_epochs) and not at_clients:
        raise ConfigError(
            f"evaluation.finetune_epochs={epochs} is for the clients' evaluation, and this run "
            "has none: set evaluation.clients=true, or evaluation.finetune_epochs=0"
        )
    return at_clients


def _client_config(recipe: DictConfig, folder: Path, columns: str | None) -> ConfigRecord:
    config = ConfigRecord()
    if recipe.runtime.simulation:
        config["state-folder"] = str(folder / STATES)
    if columns is not None:
        config[COLUMNS] = columns
    return config
