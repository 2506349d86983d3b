"""An in-process federation: Flower's messages and our strategy, with no Ray and no process."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from fedhet.client_app.client import FederatedClient
from fedhet.client_app.messages import evaluate_reply, train_reply, trained, upload_seed
from fedhet.client_app.shared_model import SharedModel
from fedhet.client_app.state import ClientStateStore, ContextStateStore
from fedhet.strategies.base import ClientData, ClientSide, LocalOptimizer, Weighting
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.tensor_selection import TensorSelector, shared_names
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.secure.reply_vector import Layout
from fedhet.strategies.round.round_report import RoundReport
from fedhet.strategies.wire.records import to_record, to_tensors

Handler = Callable[[Message], Message]


def client_of(
    model: nn.Module,
    data: ClientData,
    loss: Callable[[Tensor, Tensor], Tensor],
    *,
    client_id: int = 0,
    optimizer: LocalOptimizer | None = None,
    store: ClientStateStore | None = None,
    sides: Mapping[str, ClientSide] | None = None,
    held_out: ClientData | None = None,
    **shared: Any,
) -> FederatedClient:
    """Return a client with a model of its own; ``shared`` are attributes of a SharedModel."""
    optimizer, store = optimizer or SGD(), store or ContextStateStore(RecordDict())
    own = SharedModel(model, loss, **shared)
    return FederatedClient(own, client_id, data, optimizer, store, sides or {}, held_out)


class InProcessGrid(Grid):
    """The Grid stub of all tests: delivers each message to its node's handler.

    Args:
        handlers: by node id; a handler that raises gives an error reply, as in Flower.
        tamper: may replace a reply, or drop it by returning None.
    """

    set_run = create_message = run = None  # not used by a strategy

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        tamper: Callable[[Message], Message | None] = lambda reply: reply,
    ) -> None:
        self.handlers = dict(handlers)
        self.tamper = tamper
        self.shuffle = random.Random(1).shuffle
        self.asked: dict[str, Message] = {}  # pushed
        self.sent: list[Message] = []  # last

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids."""
        return list(self.handlers)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages; they are answered when they are pulled."""
        ids = []
        for message in messages:
            ids.append(f"message {len(self.asked)}")
            message.metadata.__dict__["_message_id"] = ids[-1]  # as Flower's grids do
            self.asked[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Answer these messages."""
        replies = [self.tamper(self._answer(self.asked[one])) for one in message_ids]
        return [reply for reply in replies if reply is not None]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Answer all messages, in a random order."""
        self.sent = list(messages)
        ids = InProcessGrid.push_messages(self, self.sent)
        replies = list(InProcessGrid.pull_messages(self, ids))
        for one in ids:
            del self.asked[one]
        self.shuffle(replies)
        return replies

    def _answer(self, message: Message) -> Message:
        try:
            return self.handlers[message.metadata.dst_node_id](message)
        except Exception as error:
            return Message(Error(code=2, reason=str(error)), reply_to=message)


def lost(reply: Message, error: Error | None = None) -> Message:
    """Return the error with which the SuperLink itself (node 1) answers for a node it has lost."""
    asked = reply.metadata.reply_to_message_id
    reply = Message(error or Error(code=5, reason="Node Unavailable"), reply_to=reply)
    reply.metadata.__dict__["_src_node_id"] = 1
    reply.metadata.__dict__["_reply_to_message_id"] = asked
    return reply


def node_info(client_id: int, num_clients: int, num_examples: int, **more: str) -> RecordDict:
    """Return an answer to the registration."""
    counts = {"num-partitions": num_clients, "num-examples": num_examples}
    return RecordDict({"client": ConfigRecord({"partition-id": client_id, **counts, **more})})


def handler(
    client: Callable[[], FederatedClient],
    client_id: int,
    num_clients: int,
    num_examples: int,
    secure: SecAggPlus | None = None,
    weighting: Weighting = "examples",
) -> Handler:
    """Return a node that builds its client anew for every message, as a real one does."""
    context = Context(1, client_id, node_config={}, state=RecordDict(), run_config={})

    def handle(message: Message) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            shown = 0 if secure else num_examples
            return Message(node_info(client_id, num_clients, shown), reply_to=message)
        if message.metadata.message_type == MessageType.EVALUATE:
            return evaluate_reply(client(), message)
        if secure is None:
            return train_reply(client(), message, evaluate_every=1)
        return secure.reply(
            message,
            context,
            train=lambda asked: trained(client(), asked, evaluate_every=1),
            layout=lambda reply: Layout.of(reply, weighting, secure.max_examples),
            seed=lambda asked: upload_seed(0, client_id, asked),
        )

    return handle


class TensorBatches:
    """Tensors as a client's data."""

    def __init__(self, inputs: Tensor, labels: Tensor, num_classes: int = 2) -> None:
        self.inputs, self.labels, self.num_classes = inputs, labels, num_classes

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.labels)

    def class_counts(self) -> list[int]:
        """Return the number of examples of each class."""
        return torch.bincount(self.labels, minlength=self.num_classes).tolist()

    def batches(self, batch_size, *, generator, train, drop_last=False):
        """Yield one pass."""
        order = torch.arange(len(self))
        if generator is not None:
            order = torch.randperm(len(self), generator=generator)
        for start in range(0, len(self), batch_size):
            chosen = order[start : start + batch_size]
            if drop_last and len(chosen) < batch_size and start > 0:
                return
            yield self.inputs[chosen], self.labels[chosen]


class Regression(nn.Module):
    """One linear head: a quadratic objective with a closed-form optimum."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.head = nn.Linear(size, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return (features, logits)."""
        return inputs, self.head(inputs)


def half_squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of (prediction - target)^2 / 2."""
    return 0.5 * (logits.squeeze(1) - labels).square().mean()


def federate(
    strategy: FederatedStrategy,
    datasets: Sequence[TensorBatches],
    *,
    model: Callable[[], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor] = half_squared_error,
    rounds: int,
    optimizer: Callable[[], LocalOptimizer] = SGD,
    options: LocalTrainingConfig | None = None,
    sides: Callable[[], Mapping[str, ClientSide]] | None = None,
    stores: Mapping[int, object] | None = None,
    tamper: Callable[[Message], Message | None] = lambda reply: reply,
    seed: int = 0,
    initial: Mapping[str, Tensor] | None = None,
    personal: str = "none",
    absent: Collection[int] = (),
    on_round: Callable[[RoundReport, ArrayRecord], object] = lambda report, arrays: False,
    should_stop: Callable[[int, Result], bool] | None = None,
    grid: Callable[..., InProcessGrid] = InProcessGrid,
    timeout: float = 3600.0,
) -> tuple[dict[str, Tensor], list[RoundReport]]:
    """Run a strategy over one client per dataset; return the final params and the reports.

    Clients that are ``absent`` have no node.
    """
    size = len(datasets)
    stores = stores or {i: ContextStateStore(RecordDict()) for i in range(size)}
    kept = TensorSelector(personal)

    def client(i: int) -> FederatedClient:
        return client_of(
            model(),
            datasets[i],
            loss,
            client_id=i,
            optimizer=optimizer(),
            store=stores[i],
            sides=sides() if sides else strategy.client_sides,
            options=options or LocalTrainingConfig(),
            seed=seed,
            personal=kept,
            compression=strategy.compression,
        )

    secure = strategy.secure_aggregation
    weighting = getattr(strategy.server_step.aggregator, "weighting", "examples")
    handlers = {
        1000 + i: handler(partial(client, i), i, size, len(datasets[i]), secure, weighting)
        for i in range(size)
        if i not in absent
    }
    reports: list[RoundReport] = []
    start = model()
    names = shared_names(start, kept)
    state = initial or {name: start.state_dict()[name] for name in names}
    result = strategy.start(
        grid(handlers, tamper),
        to_record(state),
        num_rounds=rounds,
        timeout=timeout,
        should_stop=should_stop,
        on_round=lambda report, arrays: bool(reports.append(report) or on_round(report, arrays)),
    )
    return to_tensors(result.arrays), reports
