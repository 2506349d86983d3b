"""The ClientApp: a FederatedClient assembled from the recipe and the node's own config."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from omegaconf import DictConfig

from client_app.client import FederatedClient
from client_app.messages import evaluate_reply, train_reply
from client_app.state import ClientStateStore, ContextStateStore, FolderStateStore
from client_app.training import local_options
from conf import build_part, build_solver, compose, fingerprint, plain_part, versions
from strategies.layers import LayerSelector
from strategies.records import CLIENT
from tasks import Task, build_task, pick_device

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Answer the roll call: partition id, example count, hashes, versions."""
    recipe = compose(context.run_config)
    client_id, population = _place(recipe, context)
    data, _ = _task(recipe, population).client_data(
        client_id, torch.device("cpu"), site_folder=_site_folder(context)
    )
    card: dict[str, Any] = {
        "partition-id": client_id,
        "num-partitions": population,
        "num-examples": len(data),
        "versions": str(versions()),
        **fingerprint(recipe),
    }
    return Message(RecordDict({CLIENT: ConfigRecord(card)}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train: "params", payloads and "config" in, "update", payloads and "metrics" out."""
    recipe = compose(context.run_config)
    return train_reply(_client(recipe, context), message, int(recipe.evaluation.every))


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate "params" on the client's own data: "loss" and "accuracy" out."""
    return evaluate_reply(_client(compose(context.run_config), context), message)


# ---- assembling a client from the recipe and the node's own config -------------------------------


def _client(recipe: DictConfig, context: Context) -> FederatedClient:
    client_id, population = _place(recipe, context)
    torch.set_num_threads(max(1, int(recipe.runtime.client_cpus)))
    device = pick_device(str(context.node_config.get("device", recipe.device)))
    task = _task(recipe, population)
    channels_last = bool(recipe.runtime.channels_last)
    data, held_out = task.client_data(
        client_id, device, channels_last=channels_last, site_folder=_site_folder(context)
    )
    model = task.build_model(int(recipe.seed)).to(device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    tensors = task.classifier_tensors
    return FederatedClient(
        client_id=client_id,
        model=model,
        data=data,
        held_out=held_out,
        loss=task.loss,
        solver=build_solver(recipe, tensors),
        options=local_options(recipe.local),
        store=_store(recipe, context, client_id),
        sides=build_part(recipe, "strategy.client_sides", tensors),
        seed=int(recipe.seed),
        personal=LayerSelector(recipe.strategy.personal),
    )


def _place(recipe: DictConfig, context: Context) -> tuple[int, int]:
    """Return (partition id, N); clients=0 takes N from the node config."""
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


def _store(recipe: DictConfig, context: Context, client_id: int) -> ClientStateStore:
    """Return the node's state folder, the simulation's, or else Flower's Context.state."""
    folder = str(context.node_config.get("state-folder", ""))
    if not folder and recipe.runtime.simulation and recipe.results_dir:
        folder = f"{recipe.results_dir}/client_state"
    if folder:
        return FolderStateStore(Path(folder), client_id)
    return ContextStateStore(context.state)


def _task(recipe: DictConfig, population: int) -> Task:
    parts = {key: plain_part(recipe, key) for key in ("task", "partition")}
    return _cached_task(json.dumps(parts), int(recipe.seed), population)


@lru_cache(maxsize=4)  # a worker serves many clients of one task
def _cached_task(parts: str, seed: int, population: int) -> Task:
    plain = json.loads(parts)
    return build_task(plain["task"], plain["partition"], seed=seed, num_clients=population)
