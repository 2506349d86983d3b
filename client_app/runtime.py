"""ClientRuntime: builds the clients of one process, and holds what they share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from omegaconf import DictConfig
from torch import nn

from fedhet.client_app.client import FederatedClient
from fedhet.client_app.messages import trained, without_state
from fedhet.client_app.shared_model import SharedModel
from fedhet.client_app.site_policy import POLICY, SitePolicy
from fedhet.client_app.state import ClientStateStore, ContextStateStore, FolderStateStore
from fedhet.client_app.trainable import why_not
from fedhet.common.errors import ConfigError
from fedhet.common.files import stamp
from fedhet.conf import (
    build_local_optimizer,
    build_part,
    compose_overrides,
    fingerprint,
    plain_part,
    versions,
)
from fedhet.conf.build import strategy_parts, with_norm_layers
from fedhet.strategies.attacks.attack import Attack
from fedhet.strategies.base import ClientData, ClientSide, LocalOptimizer, Reply, Weighting
from fedhet.strategies.components.aggregators import WeightedMean
from fedhet.strategies.components.local_training_config import local_training_config
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.modes.secure.reply_vector import Layout
from fedhet.strategies.round.registration import FROZEN_MODEL
from fedhet.strategies.slots import SumAggregator
from fedhet.strategies.wire.compression import Compression
from fedhet.strategies.wire.records import CONFIG, record_in
from fedhet.tasks import (
    AnyData,
    AnyTask,
    Functions,
    build_task,
    keep_freed_memory,
    make_repeatable,
    pick_device,
)
from fedhet.tasks.models.own_weights import frozen_sha256
from fedhet.tasks.models.wrapped import WrappedModel
from fedhet.tasks.pixels import black_and_white

Examples = tuple[AnyData, AnyData | None]  # to train on, held out
_CACHE_BYTES = 256 << 20
ATTACK = "attack"  # the name of a hostile client's last side


class ClientRuntime:
    """What the clients of one process share, built once and not for every message.

    Optimizer and sides are prototypes; every client gets copies. Examples are cached, up to
    ``_CACHE_BYTES``.

    Args:
        recipe: composed.
        device: of the node config; empty: the recipe's.
        num_partitions: N of the node config, for clients=0.
        functions: of a task on own data, in place of those that the recipe names.
        columns: of a table, as the sites have fitted them together.
    """

    def __init__(
        self,
        recipe: DictConfig,
        device: str,
        num_partitions: int,
        functions: Functions | None = None,
        columns: str | None = None,
    ) -> None:
        keep_freed_memory()
        self.task, self.seed = task_of(recipe, num_partitions, functions, columns), int(recipe.seed)
        self.num_clients = self.task.num_clients
        self.device = pick_device(device or str(recipe.device))
        make_repeatable(self.device)
        self.model: nn.Module = self.task.build_model(self.seed).to(self.device)
        own = isinstance(self.model, WrappedModel)  # its forward may call view
        self.channels_last = bool(recipe.runtime.channels_last) and not own
        if self.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        recipe = with_norm_layers(recipe, self.model)
        tensors = self.task.classifier_tensors
        self.optimizer: LocalOptimizer = build_local_optimizer(recipe, tensors)
        parts = strategy_parts(recipe, tensors)
        self.sides: Mapping[str, ClientSide] = parts.client_sides
        self.compression = parts.compression or Compression()
        self.options = local_training_config(recipe.local, recipe.strategy.phases)
        self.personal = TensorSelector(recipe.strategy.personal)
        self.evaluation = recipe.evaluation
        self.evaluate_every = int(recipe.evaluation.every) if recipe.evaluation.received else 0
        self.evaluates_own = recipe.evaluation.model != "global"
        self.metrics = self.task.metric_set(
            list(recipe.evaluation.metrics),
            per_class=bool(recipe.evaluation.per_class),
            device=self.device,
        )
        self.client_cpus = max(1, int(recipe.runtime.client_cpus))
        self.simulation = bool(recipe.runtime.simulation)
        self.node_info = {"versions": str(versions()), **fingerprint(recipe)}
        if frozen := frozen_sha256(self.model):
            self.node_info[FROZEN_MODEL] = frozen
        self.secure_aggregation = parts.secure_aggregation
        # the server has refused aggregators without a weighting
        aggregator = parts.aggregator or WeightedMean()
        self.weighting: Weighting = "examples"
        if isinstance(aggregator, SumAggregator):
            self.weighting = aggregator.weighting
        self.attack: Attack | None = build_part(recipe, "attack", tensors)
        if self.attack is not None:
            self.attack.white = black_and_white(self.task, self.device)[1]
        self._examples: dict[int, tuple[object, Examples]] = {}  # with the stamp of their folder
        self._cached_bytes = 0

    @cached_property
    def shared(self) -> SharedModel:
        """The model, which the clients use one after the other."""
        return SharedModel(
            self.model,
            self.task.loss,
            self.options,
            self.seed,
            personal=self.personal,
            test_data=self.test_data,
            build=self.task.build_model,
            metrics=self.metrics,
            compression=self.compression,
        )

    @cached_property
    def test_data(self) -> AnyData | None:
        """The global test set, where a simulation's clients evaluate their own models."""
        if not (self.evaluates_own and self.simulation):
            return None
        return self.task.test_data(self.device, channels_last=self.channels_last)

    def layout(self, reply: Reply) -> Layout:
        """Return the layout of a reply's vector under secure aggregation."""
        assert self.secure_aggregation is not None
        return Layout.of(reply, self.weighting, self.secure_aggregation.max_examples)

    def client_data(self, client_id: int, site_folder: Path | None) -> Examples:
        """Return a client's training and held-out examples, on the device."""
        content = stamp(str(site_folder)) if site_folder else ()
        known, examples = self._examples.get(client_id, (None, None))
        if examples is not None and known == content:
            return examples
        if examples is not None:  # of the folder as it was before
            del self._examples[client_id]
            self._cached_bytes -= sum(part.num_bytes for part in examples if part is not None)
        data, held_out = self.task.client_data(
            client_id, self.device, channels_last=self.channels_last, site_folder=site_folder
        )
        size = sum(part.num_bytes for part in (data, held_out) if part is not None)
        if self._cached_bytes + size < _CACHE_BYTES:
            self._examples[client_id] = content, (data, held_out)
            self._cached_bytes += size
        return data, held_out

    def why_not_train(self, client_id: int, site_folder: Path | None) -> str:
        """Return why a client must fail to train; empty if nothing speaks against it."""
        data, _ = self.client_data(client_id, site_folder)
        return why_not(self.model, data, self.options, self.optimizer)

    def client_for(
        self, context: Context, message: Message, policy: SitePolicy | None = None
    ) -> FederatedClient:
        """Return the client that a node plays, ready for a message; its replies obey ``policy``."""
        client_id = client_id_of(context, self.num_clients)
        torch.set_num_threads(self.client_cpus)
        site = site_folder(context)
        store = self._store(context, message, client_id)
        return self._client(client_id, store, site, message, policy)

    def _client(
        self,
        client_id: int,
        store: ClientStateStore,
        site: Path | None,
        asked: Message | None,
        policy: SitePolicy | None = None,
    ) -> FederatedClient:
        """Return a client; a hostile one attacks if ``asked``."""
        data: ClientData
        data, held_out = self.client_data(client_id, site)
        optimizer, sides = copy.deepcopy(self.optimizer), copy.deepcopy(dict(self.sides))
        if asked is not None and self.attack is not None and client_id in self.attack.hostile:
            attack = copy.copy(self.attack)
            attack.benign = partial(self._benign, client_id, asked)
            data, sides[ATTACK] = attack.data(data), attack
        if policy is not None:
            sides[POLICY] = policy.side(data, held_out, self.task)
        loss = self.task.training_loss(data.class_counts)
        return FederatedClient(
            self.shared, client_id, data, optimizer, store, sides, held_out, loss
        )

    def _benign(self, client_id: int, message: Message) -> list[Reply]:
        """Return what the other hostile clients would honestly answer, in their first round."""
        assert self.attack is not None
        others = sorted(self.attack.hostile - {client_id})
        fresh = (ContextStateStore(RecordDict()) for _ in others)
        return [
            trained(self._client(other, store, None, None), without_state(message))
            for other, store in zip(others, fresh, strict=True)
        ]

    def _store(self, context: Context, message: Message, client_id: int) -> ClientStateStore:
        """Return the node's state folder, in a simulation the run's, else Flower's Context."""
        folder = str(context.node_config.get("state-folder", ""))
        if not folder and self.simulation:  # server and clients share a disk
            config = record_in(message.content, CONFIG, ConfigRecord) or ConfigRecord()
            folder = str(config.get("state-folder", ""))
        if folder:
            return FolderStateStore(_expanded(folder), client_id)
        return ContextStateStore(context.state)


@lru_cache(maxsize=64)  # asked for every message to a client
def _expanded(folder: str) -> Path:
    return Path(folder).expanduser()


def site_folder(context: Context) -> Path | None:
    """Return the folder of a node's own examples, if it has one."""
    folder = context.node_config.get("data-folder")
    return Path(str(folder)) if folder else None


def num_partitions_of(context: Context) -> int:
    """Return the num-partitions of a node's config; 0 if it has none."""
    return int(context.node_config.get("num-partitions", 0))


def client_id_of(context: Context, num_clients: int) -> int:
    """Return the partition id of a node."""
    if "partition-id" not in context.node_config:
        raise ConfigError("the node config lacks partition-id: --node-config 'partition-id=0 ...'")
    client_id = int(context.node_config["partition-id"])
    if not 0 <= client_id < num_clients:
        raise ConfigError(
            f"partition-id={client_id} is not one of 0..{num_clients - 1}: there are more "
            f"SuperNodes than clients={num_clients}; change clients or the number of SuperNodes"
        )
    return client_id


def task_of(
    recipe: DictConfig,
    num_partitions: int,
    functions: Functions | None,
    columns: str | None = None,
) -> AnyTask:
    """Return the task of a recipe's clients; ``num_partitions`` is for clients=0."""
    num_clients = int(recipe.clients) or num_partitions
    if num_clients == 0:
        raise ConfigError(
            "clients=0 takes N from the node config, which lacks num-partitions: set clients, or "
            "--node-config 'partition-id=0 num-partitions=N'"
        )
    return build_task(
        plain_part(recipe, "task"),
        plain_part(recipe, "partition"),
        seed=int(recipe.seed),
        num_clients=num_clients,
        functions=functions,
        columns=columns,
    )


def client_runtime(
    context: Context,
    overrides: tuple[str, ...],
    functions: Functions | None,
    columns: str | None = None,
) -> ClientRuntime:
    """Return the runtime of a recipe and a node's config; built once per run in a process.

    It is built anew if the files that ``task.path`` names change.
    """
    device = str(context.node_config.get("device", ""))
    path = compose_overrides(overrides).task.get("path")
    content = (context.run_id, stamp(path) if path else ())
    size = num_partitions_of(context)
    return _build_runtime(overrides, device, size, functions, columns, content)


@lru_cache(maxsize=2)
def _build_runtime(
    overrides: tuple[str, ...],
    device: str,
    num_partitions: int,
    functions: Functions | None,
    columns: str | None,
    content: tuple[object, ...],  # what the examples were loaded from
) -> ClientRuntime:
    return ClientRuntime(compose_overrides(overrides), device, num_partitions, functions, columns)
