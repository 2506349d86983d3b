"""The ClientApp: a FederatedClient assembled from the recipe and the node's own config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from omegaconf import DictConfig
from torch import nn

from client_app.client import FederatedClient
from client_app.messages import evaluate_reply, train_reply
from client_app.state import ClientStateStore, ContextStateStore, FolderStateStore
from conf import (
    build_part,
    build_solver,
    compose_overrides,
    fingerprint,
    overrides_of,
    plain_part,
    versions,
)
from strategies.base import ClientSide, LocalSolver
from strategies.layers import LayerSelector
from strategies.local_options import local_options
from strategies.records import CLIENT, CONFIG
from tasks import Task, build_task, keep_freed_memory, pick_device

app = ClientApp()


@dataclass(frozen=True)
class Workshop:
    """What the clients of one process have in common, made once and not once a message.

    Model, solver and sides are prototypes: every client works on copies of its own.
    """

    recipe: DictConfig
    task: Task
    model: nn.Module
    solver: LocalSolver
    sides: Mapping[str, ClientSide]
    card: Mapping[str, str]


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer the roll call: partition id, example count, hashes, versions."""
    client_id, population = _place(context)
    data, _ = _workshop(context).task.client_data(client_id, site_folder=_site_folder(context))
    card = ConfigRecord(dict(_workshop(context).card))
    card["partition-id"] = client_id
    card["num-partitions"] = population
    card["num-examples"] = len(data)
    return Message(RecordDict({CLIENT: card}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train: "params", payloads and "config" in, "update", payloads and "metrics" out."""
    every = int(_workshop(context).recipe.evaluation.every)
    return train_reply(_client(context, message), message, every)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate "params" on the client's own data: "loss" and "accuracy" out."""
    return evaluate_reply(_client(context, message), message)


# ---- assembling a client from the recipe and the node's own config -------------------------------


def _client(context: Context, message: Message) -> FederatedClient:
    workshop = _workshop(context)
    recipe = workshop.recipe
    client_id, _ = _place(context)
    torch.set_num_threads(max(1, int(recipe.runtime.client_cpus)))
    device = pick_device(str(context.node_config.get("device", recipe.device)))
    data, held_out = workshop.task.client_data(
        client_id,
        device,
        channels_last=bool(recipe.runtime.channels_last),
        site_folder=_site_folder(context),
    )
    return FederatedClient(
        client_id=client_id,
        model=copy.deepcopy(workshop.model).to(device),
        data=data,
        held_out=held_out,
        loss=workshop.task.loss,
        solver=copy.deepcopy(workshop.solver),
        options=local_options(recipe.local),
        store=_store(recipe, context, message, client_id),
        sides=copy.deepcopy(dict(workshop.sides)),
        seed=int(recipe.seed),
        personal=LayerSelector(recipe.strategy.personal),
    )


def _workshop(context: Context) -> Workshop:
    _, population = _place(context)
    return _make_workshop(tuple(overrides_of(context.run_config)), population)


@lru_cache(maxsize=2)
def _make_workshop(overrides: tuple[str, ...], population: int) -> Workshop:
    keep_freed_memory()
    recipe = compose_overrides(overrides)
    task = build_task(
        plain_part(recipe, "task"),
        plain_part(recipe, "partition"),
        seed=int(recipe.seed),
        num_clients=population,
    )
    model: nn.Module = task.build_model(int(recipe.seed))
    if recipe.runtime.channels_last:
        model = model.to(memory_format=torch.channels_last)
    tensors = task.classifier_tensors
    return Workshop(
        recipe=recipe,
        task=task,
        model=model,
        solver=build_solver(recipe, tensors),
        sides=build_part(recipe, "strategy.client_sides", tensors),
        card={"versions": str(versions()), **fingerprint(recipe)},
    )


def _place(context: Context) -> tuple[int, int]:
    """Return (partition id, N); clients=0 takes N from the node config."""
    recipe = compose_overrides(tuple(overrides_of(context.run_config)))
    node = context.node_config
    if "partition-id" not in node:
        raise ValueError("the node config lacks partition-id: --node-config 'partition-id=0 ...'")
    population = int(recipe.clients) or int(node["num-partitions"])
    client_id = int(node["partition-id"])
    if not 0 <= client_id < population:
        raise ValueError(
            f"partition-id={client_id} is not one of 0..{population - 1}: there are more "
            f"SuperNodes than clients={population}; change clients or the number of SuperNodes"
        )
    return client_id, population


def _site_folder(context: Context) -> Path | None:
    folder = context.node_config.get("data-folder")
    return Path(str(folder)) if folder else None


def _store(
    recipe: DictConfig, context: Context, message: Message, client_id: int
) -> ClientStateStore:
    """Return the node's state folder, in a simulation the run's, or else Flower's Context.state."""
    folder = str(context.node_config.get("state-folder", ""))
    if not folder and recipe.runtime.simulation:  # server and clients share a disk
        folder = str(message.content.config_records[CONFIG].get("state-folder", ""))
    if folder:
        return FolderStateStore(Path(folder).expanduser(), client_id)
    return ContextStateStore(context.state)
