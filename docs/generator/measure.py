"""What a method sends, keeps and computes: two rounds of it on a tiny federation, in this process.

Counted is the last round, in which clients have a state. Counts, not times: they are the same on
every machine.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from client_app.app import app as client_app
from conf import RunConfig, compose
from server_app.run import Run
from strategies.base import Payloads, Tensors
from strategies.round.records import METRICS, scalars, to_tensors

_CLIENTS = 2
_WORDS = (
    "task=digits",
    f"clients={_CLIENTS}",
    "rounds=2",
    "local.epochs=1",
    "local.steps=null",
    "local.batch_size=64",
    "strategy.phases=[]",  # one epoch cannot be divided, and no count depends on it
    "participation=1.0",
    "evaluation.every=0",
    "checkpoint.every=0",
    "device=cpu",
    "logger=none",
    "runtime.simulation=false",  # client state in Context.state, where it is seen
    "runtime.channels_last=false",
)
_AT_SERVER = {"strategy.dense.epochs": 1, "strategy.dense.steps": 1}  # not counted, minutes long
TASK = "`digits` with its default model"

Sizes = Mapping[str, float]  # by name, as a share of the model


@dataclass(frozen=True)
class Cost:
    """What a round of a method takes; sizes are shares of the model's bytes.

    Attributes:
        down: what the server sends a client, by payload.
        up: what a client sends, by payload.
        client_state: what a client keeps between rounds, by name.
        server_state: what the server keeps beside the model, by owner and name.
        forward: examples sent through the network, per example of an epoch.
        backward: examples whose gradient is taken, per example of an epoch.
    """

    down: Sizes
    up: Sizes
    client_state: Sizes
    server_state: Sizes
    forward: float
    backward: float

    @property
    def traffic(self) -> float:
        """Bytes down and up for every byte of the model."""
        return sum(self.down.values()) + sum(self.up.values())


def measure(*overrides: str) -> Cost:
    """Run two rounds of a recipe, such as ``strategy=fedprox``, and count."""
    with tempfile.TemporaryDirectory() as folder, _quiet():
        recipe = compose(_run_config(overrides))
        short = {k: v for k, v in _AT_SERVER.items() if OmegaConf.select(recipe, k) is not None}
        needed = {**short, **recipe.strategy.requires}.items()
        words = [*_WORDS, *(f"{key}={value}" for key, value in needed), *overrides]
        run_config = _run_config([*words, f"results_dir={folder}/run"])
        run = Run(compose(run_config), Path(folder) / "run", None)
        grid = _OneProcess(run_config, type(run.model), int(run.recipe.clients))
        run.start(grid)
    whole = _bytes(run.model.state_dict())
    server_state = run.strategy.server_step.state_dict()
    return Cost(
        down=_shares(grid.down, whole),
        up=_shares(grid.up, whole),
        client_state=_shares(grid.client_state(), whole),
        server_state=_shares(server_state, whole),
        forward=grid.passes.forward / grid.examples,
        backward=grid.passes.backward / grid.examples,
    )


def _run_config(words: Sequence[str]) -> dict[str, bool | float | int | str]:
    return {"overrides": json.dumps(list(words))}


@dataclass
class _Passes:
    """Counts examples through networks of one class, wherever they are called from."""

    network: type[nn.Module]
    forward: int = 0
    backward: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count while inside."""
        handle = register_module_forward_hook(self._seen)
        try:
            yield
        finally:
            handle.remove()

    def _seen(self, module: nn.Module, inputs: tuple[Tensor, ...], output: object) -> None:
        if type(module) is not self.network:
            return
        size = len(inputs[0])
        self.forward += size
        logits = output[-1] if isinstance(output, tuple) else output
        if isinstance(logits, Tensor) and logits.requires_grad:
            logits.register_hook(lambda _: self._reached(size))  # type: ignore[no-untyped-call]

    def _reached(self, size: int) -> None:
        self.backward += size


class _OneProcess(Grid):
    """Two ClientApps as Flower's Grid; remembers what the last round's first client was sent."""

    def __init__(self, run_config: RunConfig, network: type[nn.Module], clients: int) -> None:
        identity = TaskIdentity
        identity.run_id, identity.node_id, identity.task_id = 1, 1, 1  # messages carry them
        self._network = network
        self._contexts = [
            Context(
                run_id=1,
                node_id=client + 1,
                node_config={"partition-id": client, "num-partitions": clients},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for client in range(clients)
        ]
        self.passes = _Passes(network)
        self.examples = 0
        self.down: Payloads = {}
        self.up: Payloads = {}

    def client_state(self) -> Payloads:
        """Return what the first client keeps, by name without experiment and round."""
        records = self._contexts[0].state.array_records
        return {name.split("/", 3)[3]: to_tensors(record) for name, record in records.items()}

    def get_node_ids(self) -> Iterable[int]:
        """Return the clients' node ids."""
        return [context.node_id for context in self._contexts]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Let every client answer; count if it trains."""
        self.passes, self.examples = _Passes(self._network), 0
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        client = message.metadata.dst_node_id - 1
        if message.metadata.message_type != MessageType.TRAIN:
            return client_app(message, self._contexts[client])
        with self.passes.counted():
            reply = client_app(message, self._contexts[client])
        self.examples += int(scalars(reply.content.metric_records[METRICS])["num-examples"])
        if client == 0:
            self.down, self.up = _tensors(message), _tensors(reply)
        return reply

    # ---- the rest of Flower's interface, which a strategy does not call -----------------------

    def set_run(self, run: FlowerRun) -> None:
        """Not needed."""

    @property
    def run(self) -> FlowerRun:
        """Not needed."""
        return FlowerRun.create_empty(run_id=1)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Not needed."""
        raise NotImplementedError

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Not needed."""
        raise NotImplementedError

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Not needed."""
        raise NotImplementedError


def _tensors(message: Message) -> Payloads:
    return {name: to_tensors(record) for name, record in message.content.array_records.items()}


def _shares(groups: Payloads, whole: int) -> Sizes:
    return {name: _bytes(tensors) / whole for name, tensors in groups.items() if tensors}


def _bytes(tensors: Tensors) -> int:
    return sum(value.numel() * value.element_size() for value in tensors.values())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Flower's log of the rounds out of the terminal."""
    flower = logging.getLogger("flwr")
    level = flower.level
    flower.setLevel(logging.WARNING)
    try:
        yield
    finally:
        flower.setLevel(level)
