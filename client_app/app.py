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
    build_part,
    build_solver,
    compose_overrides,
    fingerprint,
    overrides_of,
    plain_part,
    versions,
)
from strategies.base import ClientSide, LocalSolver, Reply, Weighting
from strategies.layers import LayerSelector
from strategies.local_options import LocalOptions, local_options
from strategies.records import CLIENT, CONFIG
from strategies.secure_aggregation import SecAggPlus
from strategies.sums import Layout
from tasks import Task, build_task, keep_freed_memory, pick_device
from tasks.conformal import CALIBRATE
from tasks.tensor_data import TensorData

app = ClientApp()

Examples = tuple[TensorData, TensorData | None]
_KEPT_BYTES = 256 << 20


@dataclass
class Workshop:
    """What the clients of one process have in common, made once and not once a message.

    Solver and sides are prototypes: every client gets copies. The model is worked on by one client
    after the other, of which ``client`` is the last. ``examples`` are those of the clients that
    this process has been, as far as they fit ``_KEPT_BYTES``.
    """

    task: Task
    model: nn.Module
    device: torch.device
    solver: LocalSolver
    sides: Mapping[str, ClientSide]
    options: LocalOptions
    personal: LayerSelector
    population: int
    seed: int
    evaluation: DictConfig
    client_cpus: int
    channels_last: bool
    simulation: bool
    card: Mapping[str, str]
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
def introduce(message: Message, context: Context) -> Message:
    """Answer the roll call: partition id, example count, hashes, versions."""
    with _ended_when_too_late(message, context):
        workshop = _workshop(context)
        client_id = _client_id(context, workshop.population)
        data, _ = workshop.task.client_data(client_id, site_folder=_site_folder(context))
    card = ConfigRecord(dict(workshop.card))
    card["partition-id"] = client_id
    card["num-partitions"] = workshop.population
    card["num-examples"] = len(data)
    if workshop.secure_aggregation is not None:
        workshop.secure_aggregation.check_client(len(data))
        card["num-examples"] = 0  # the server is to learn the sum in a round, and no client's own
    return Message(RecordDict({CLIENT: card}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train: "params", payloads and "config" in, "update", payloads and "metrics" out."""
    with _ended_when_too_late(message, context):
        workshop = _workshop(context)
        evaluation = workshop.evaluation
        every = int(evaluation.every) if evaluation.received else 0
        own = evaluation.model != "global"
        if workshop.secure_aggregation is None:
            return train_reply(_client(workshop, context, message), message, every, own)
        client_id = _client_id(context, workshop.population)
        return workshop.secure_aggregation.reply(
            message,
            context,
            train=lambda asked: trained(_client(workshop, context, asked), asked, every, own),
            layout=workshop.layout,
            seed=lambda asked: upload_seed(workshop.seed, client_id, asked),
        )


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate "params" on the client's own data: "loss" and "accuracy" out."""
    with _ended_when_too_late(message, context):
        workshop = _workshop(context)
        finetune_epochs = int(workshop.evaluation.finetune_epochs)
        return evaluate_reply(_client(workshop, context, message), message, finetune_epochs)


@app.query(CALIBRATE)
def calibrate(message: Message, context: Context) -> Message:
    """Say how well "params" know what the client holds out: sums and counts, no example."""
    with _ended_when_too_late(message, context):
        return calibrate_reply(_client(_workshop(context), context, message), message)


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


def _client(workshop: Workshop, context: Context, message: Message) -> FederatedClient:
    client_id = _client_id(context, workshop.population)
    torch.set_num_threads(workshop.client_cpus)
    data, held_out = workshop.client_data(client_id, _site_folder(context))
    solver, sides = copy.deepcopy(workshop.solver), copy.deepcopy(dict(workshop.sides))
    store = _store(workshop, context, message, client_id)
    if workshop.client is not None:
        workshop.client = workshop.client.become(client_id, data, held_out, solver, sides, store)
        return workshop.client
    workshop.client = FederatedClient(
        client_id=client_id,
        model=workshop.model,
        data=data,
        held_out=held_out,
        loss=workshop.task.loss,
        solver=solver,
        options=workshop.options,
        store=store,
        sides=sides,
        seed=workshop.seed,
        personal=workshop.personal,
        test_data=workshop.test_data,
        build=workshop.task.build_model,
    )
    return workshop.client


def _workshop(context: Context) -> Workshop:
    node = context.node_config
    if "partition-id" not in node:
        raise ValueError("the node config lacks partition-id: --node-config 'partition-id=0 ...'")
    overrides = tuple(overrides_of(context.run_config))
    return _make_workshop(
        overrides, str(node.get("device", "")), int(node.get("num-partitions", 0))
    )


@lru_cache(maxsize=2)
def _make_workshop(overrides: tuple[str, ...], device: str, num_partitions: int) -> Workshop:
    """Build it; ``device`` and ``num_partitions`` (where clients=0) are the node config's."""
    keep_freed_memory()
    recipe = compose_overrides(overrides)
    population, seed = int(recipe.clients) or num_partitions, int(recipe.seed)
    if population == 0:
        raise ValueError(
            "clients=0 takes N from the node config, which lacks num-partitions: set clients, or "
            "--node-config 'partition-id=0 num-partitions=N'"
        )
    task = build_task(
        plain_part(recipe, "task"),
        plain_part(recipe, "partition"),
        seed=seed,
        num_clients=population,
    )
    chosen = pick_device(device or str(recipe.device))
    channels_last = bool(recipe.runtime.channels_last)
    model: nn.Module = task.build_model(seed).to(chosen)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    tensors = task.classifier_tensors
    summing = build_part(recipe, "strategy.secure_aggregation", tensors)
    return Workshop(
        task=task,
        model=model,
        device=chosen,
        solver=build_solver(recipe, tensors),
        sides=build_part(recipe, "strategy.client_sides", tensors),
        options=local_options(recipe.local, recipe.strategy.phases),
        personal=LayerSelector(recipe.strategy.personal),
        population=population,
        seed=seed,
        evaluation=recipe.evaluation,
        client_cpus=max(1, int(recipe.runtime.client_cpus)),
        channels_last=channels_last,
        simulation=bool(recipe.runtime.simulation),
        card={"versions": str(versions()), **fingerprint(recipe)},
        secure_aggregation=summing,
        # the server has refused whatever is no mean
        weighting=build_part(recipe, "strategy.aggregator", tensors).weighting if summing else None,
    )


def _client_id(context: Context, population: int) -> int:
    """Return the partition id."""
    client_id = int(context.node_config["partition-id"])
    if not 0 <= client_id < population:
        raise ValueError(
            f"partition-id={client_id} is not one of 0..{population - 1}: there are more "
            f"SuperNodes than clients={population}; change clients or the number of SuperNodes"
        )
    return client_id


def _site_folder(context: Context) -> Path | None:
    folder = context.node_config.get("data-folder")
    return Path(str(folder)) if folder else None


def _store(
    workshop: Workshop, context: Context, message: Message, client_id: int
) -> ClientStateStore:
    """Return the node's state folder, in a simulation the run's, or else Flower's Context.state."""
    folder = str(context.node_config.get("state-folder", ""))
    if not folder and workshop.simulation:  # server and clients share a disk
        folder = str(message.content.config_records[CONFIG].get("state-folder", ""))
    if folder:
        return FolderStateStore(Path(folder).expanduser(), client_id)
    return ContextStateStore(context.state)
