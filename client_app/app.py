"""The ClientApp: a FederatedClient assembled from the recipe and the node's own config."""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from omegaconf import DictConfig
from torch import nn

from client_app.calibration import calibrate_reply
from client_app.client import FederatedClient
from client_app.messages import evaluate_reply, train_reply, trained, upload_seed
from client_app.state import ClientStateStore, ContextStateStore, FolderStateStore
from conf import (
    build_local_optimizer,
    build_part,
    compose_overrides,
    fingerprint,
    overrides_of,
    plain_part,
    versions,
)
from strategies.base import ClientSide, LocalOptimizer, Reply, Weighting
from strategies.components.local_training_config import LocalTrainingConfig, local_training_config
from strategies.components.tensor_selection import TensorSelector
from strategies.privacy.reply_vector import Layout
from strategies.privacy.secure_aggregation import SecAggPlus
from strategies.round.records import CLIENT, CONFIG
from tasks import Task, build_task, keep_freed_memory, pick_device
from tasks.conformal import CALIBRATE
from tasks.tensor_data import TensorData

app = ClientApp()

Examples = tuple[TensorData, TensorData | None]
_KEPT_BYTES = 256 << 20


@dataclass
class ClientRuntime:
    """What the clients of one process have in common, made once and not once a message.

    Optimizer and sides are prototypes: every client gets copies. One client after the other works
    on the model, of which ``client`` is the last. ``examples`` are those of the clients that
    this process has been, as far as they fit ``_KEPT_BYTES``.
    """

    task: Task
    model: nn.Module
    device: torch.device
    optimizer: LocalOptimizer
    sides: Mapping[str, ClientSide]
    options: LocalTrainingConfig
    personal: TensorSelector
    num_clients: int
    seed: int
    evaluation: DictConfig
    client_cpus: int
    channels_last: bool
    simulation: bool
    node_info: Mapping[str, str]
    examples: dict[int, Examples] = field(default_factory=dict)
    secure_aggregation: SecAggPlus | None = None
    weighting: Weighting | None = None
    client: FederatedClient | None = None

    @cached_property
    def test_data(self) -> TensorData | None:
        """The global test set, where clients evaluate their own models and share a disk with it."""
        if self.evaluation.model == "global" or not self.simulation:
            return None
        return self.task.test_data(self.device, channels_last=self.channels_last)

    def layout(self, reply: Reply) -> Layout:
        """Return the layout of a reply's vector, where replies are summed."""
        assert self.secure_aggregation is not None
        assert self.weighting is not None
        return Layout.of(reply, self.weighting, self.secure_aggregation.max_examples)

    def client_data(self, client_id: int, site_folder: Path | None) -> Examples:
        """Return what a client trains on and what it holds out, on the device."""
        if client_id in self.examples:
            return self.examples[client_id]
        data, held_out = self.task.client_data(
            client_id, self.device, channels_last=self.channels_last, site_folder=site_folder
        )
        kept = [part for pair in self.examples.values() for part in pair if part is not None]
        if sum(part.num_bytes for part in (data, *kept)) < _KEPT_BYTES:
            self.examples[client_id] = data, held_out
        return data, held_out


@app.query()
def register(message: Message, context: Context) -> Message:
    """Answer the roll call: partition id, example count, hashes, versions."""
    with _ended_when_too_late(message, context):
        runtime = _client_runtime(context)
        client_id = _client_id(context, runtime.num_clients)
        data, _ = runtime.task.client_data(client_id, site_folder=_site_folder(context))
    node_info = ConfigRecord(dict(runtime.node_info))
    node_info["partition-id"] = client_id
    node_info["num-partitions"] = runtime.num_clients
    node_info["num-examples"] = len(data)
    if runtime.secure_aggregation is not None:
        runtime.secure_aggregation.check_client(len(data))
        node_info["num-examples"] = 0  # the server learns the sum of a round, not a client's
    return Message(RecordDict({CLIENT: node_info}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train: "params", payloads and "config" in, "update", payloads and "metrics" out."""
    with _ended_when_too_late(message, context):
        runtime = _client_runtime(context)
        evaluation = runtime.evaluation
        every = int(evaluation.every) if evaluation.received else 0
        own = evaluation.model != "global"
        if runtime.secure_aggregation is None:
            return train_reply(_client(runtime, context, message), message, every, own)
        client_id = _client_id(context, runtime.num_clients)
        return runtime.secure_aggregation.reply(
            message,
            context,
            train=lambda asked: trained(_client(runtime, context, asked), asked, every, own),
            layout=runtime.layout,
            seed=lambda asked: upload_seed(runtime.seed, client_id, asked),
        )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate "params" on the client's own data: "loss" and "accuracy" out."""
    with _ended_when_too_late(message, context):
        runtime = _client_runtime(context)
        finetune_epochs = int(runtime.evaluation.finetune_epochs)
        return evaluate_reply(_client(runtime, context, message), message, finetune_epochs)


@app.query(CALIBRATE)
def calibrate(message: Message, context: Context) -> Message:
    """Say how well "params" know what the client holds out: sums and counts, no example."""
    with _ended_when_too_late(message, context):
        return calibrate_reply(_client(_client_runtime(context), context, message), message)


@contextlib.contextmanager
def _ended_when_too_late(message: Message, context: Context) -> Iterator[None]:
    """End this process when nobody waits for the reply any more, and say where it was.

    A SuperNode gives its executor one message after another and waits for each without end: a
    client that hangs would be out of the run for good. Not in a simulation, whose workers play
    other clients, too.
    """
    if compose_overrides(tuple(overrides_of(context.run_config))).runtime.simulation:
        yield
        return
    config = message.content.config_records.get(CONFIG, ConfigRecord())
    seconds = float(str(config.get("timeout-seconds", message.metadata.ttl)))
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# ---- assembling a client from the recipe and the node's own config -------------------------------


def _client(runtime: ClientRuntime, context: Context, message: Message) -> FederatedClient:
    client_id = _client_id(context, runtime.num_clients)
    torch.set_num_threads(runtime.client_cpus)
    data, held_out = runtime.client_data(client_id, _site_folder(context))
    optimizer, sides = copy.deepcopy(runtime.optimizer), copy.deepcopy(dict(runtime.sides))
    store = _store(runtime, context, message, client_id)
    if runtime.client is not None:
        runtime.client = runtime.client.rebind(client_id, data, held_out, optimizer, sides, store)
        return runtime.client
    runtime.client = FederatedClient(
        client_id=client_id,
        model=runtime.model,
        data=data,
        held_out=held_out,
        loss=runtime.task.loss,
        optimizer=optimizer,
        options=runtime.options,
        store=store,
        sides=sides,
        seed=runtime.seed,
        personal=runtime.personal,
        test_data=runtime.test_data,
        build=runtime.task.build_model,
    )
    return runtime.client


def _client_runtime(context: Context) -> ClientRuntime:
    node = context.node_config
    if "partition-id" not in node:
        raise ValueError("the node config lacks partition-id: --node-config 'partition-id=0 ...'")
    overrides = tuple(overrides_of(context.run_config))
    return _build_runtime(
        overrides, str(node.get("device", "")), int(node.get("num-partitions", 0))
    )


@lru_cache(maxsize=2)
def _build_runtime(overrides: tuple[str, ...], device: str, num_partitions: int) -> ClientRuntime:
    """Build it; ``device`` and ``num_partitions`` (where clients=0) are the node config's."""
    keep_freed_memory()
    recipe = compose_overrides(overrides)
    num_clients, seed = int(recipe.clients) or num_partitions, int(recipe.seed)
    if num_clients == 0:
        raise ValueError(
            "clients=0 takes N from the node config, which lacks num-partitions: set clients, or "
            "--node-config 'partition-id=0 num-partitions=N'"
        )
    task = build_task(
        plain_part(recipe, "task"),
        plain_part(recipe, "partition"),
        seed=seed,
        num_clients=num_clients,
    )
    chosen = pick_device(device or str(recipe.device))
    channels_last = bool(recipe.runtime.channels_last)
    model: nn.Module = task.build_model(seed).to(chosen)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    tensors = task.classifier_tensors
    summing = build_part(recipe, "strategy.secure_aggregation", tensors)
    return ClientRuntime(
        task=task,
        model=model,
        device=chosen,
        optimizer=build_local_optimizer(recipe, tensors),
        sides=build_part(recipe, "strategy.client_sides", tensors),
        options=local_training_config(recipe.local, recipe.strategy.phases),
        personal=TensorSelector(recipe.strategy.personal),
        num_clients=num_clients,
        seed=seed,
        evaluation=recipe.evaluation,
        client_cpus=max(1, int(recipe.runtime.client_cpus)),
        channels_last=channels_last,
        simulation=bool(recipe.runtime.simulation),
        node_info={"versions": str(versions()), **fingerprint(recipe)},
        secure_aggregation=summing,
        # the server has refused whatever is no mean
        weighting=build_part(recipe, "strategy.aggregator", tensors).weighting if summing else None,
    )


def _client_id(context: Context, num_clients: int) -> int:
    """Return the partition id."""
    client_id = int(context.node_config["partition-id"])
    if not 0 <= client_id < num_clients:
        raise ValueError(
            f"partition-id={client_id} is not one of 0..{num_clients - 1}: there are more "
            f"SuperNodes than clients={num_clients}; change clients or the number of SuperNodes"
        )
    return client_id


def _site_folder(context: Context) -> Path | None:
    folder = context.node_config.get("data-folder")
    return Path(str(folder)) if folder else None


def _store(
    runtime: ClientRuntime, context: Context, message: Message, client_id: int
) -> ClientStateStore:
    """Return the node's state folder, in a simulation the run's, or else Flower's Context.state."""
    folder = str(context.node_config.get("state-folder", ""))
    if not folder and runtime.simulation:  # server and clients share a disk
        folder = str(message.content.config_records[CONFIG].get("state-folder", ""))
    if folder:
        return FolderStateStore(Path(folder).expanduser(), client_id)
    return ContextStateStore(context.state)
