"""What a strategy is made of: the parts of its method, and the setup of its run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fedhet.common.errors import require_range
from fedhet.strategies.base import ClientSide, ServerSide
from fedhet.strategies.components import schedules
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.systems import ClientSystem
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.round.registration import FederationConfig
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.slots import (
    Aggregator,
    ClientSampler,
    Observer,
    Output,
    ReplyTransform,
    Schedule,
    ServerOptimizer,
)
from fedhet.strategies.wire.compression import Compression

# What there is one of. A method may also replace the local optimizer, and what settings give: the
# phases of local training, and the tensors that stay at the clients.
SLOTS = ("aggregator", "server_optimizer", "output", "sampler", "asynchronous")


@dataclass(frozen=True)
class Parts:
    """The parts of a method; None leaves a slot to FedAvg."""

    client_sides: Mapping[str, ClientSide] = field(default_factory=dict)  # client halves, by name
    server_sides: Mapping[str, ServerSide] = field(default_factory=dict)  # server halves, by name
    # applied in the order of their names
    transforms: Mapping[str, ReplyTransform] = field(default_factory=dict)
    aggregator: Aggregator | None = None  # the mean weighted by example counts
    server_optimizer: ServerOptimizer | None = None  # SGD
    output: Output | None = None  # the model that is evaluated and stored: the new x
    sampler: ClientSampler | None = None  # chooses the cohort over client ids: all clients
    asynchronous: Asynchronous | None = None  # rounds that wait for nobody
    compression: Compression | None = None  # of the messages of training: they are not
    secure_aggregation: SecAggPlus | None = None  # the server learns a sum and no single reply

    def __or__(self, other: Parts) -> Parts:
        """Return both; if both fill a slot, the other's part counts.

        Sides are sorted by name: no sum over them depends on the order of the methods.
        """
        merged: dict[str, Any] = {}
        for one in fields(self):
            left, right = getattr(self, one.name), getattr(other, one.name)
            if isinstance(left, Mapping):
                merged[one.name] = dict(sorted({**left, **right}.items()))
            else:
                merged[one.name] = left if right is None else right
        return Parts(**merged)


@dataclass(frozen=True)
class Setup:
    """What a strategy is told about its run."""

    local_lr: float = 0.05  # eta_l, sent to the clients as "lr"
    schedule: Schedule = field(default_factory=schedules.Constant)  # factor of local_lr by round
    # what the clients' counts of steps are checked against; None: they are not
    local_training: LocalTrainingConfig | None = None
    server_model: ServerModel | None = None  # the task's model, for slots that run it
    buffers: Collection[str] = ()  # tensors that are not trained (BatchNorm's statistics)
    federation: FederationConfig = field(default_factory=FederationConfig)
    system: ClientSystem | None = None  # slow, absent and vanishing clients of a simulation
    observers: Sequence[Observer] = ()  # called before the transforms
    # whether clients evaluate, and what they may report beside accuracy and loss
    client_metrics: ClientMetrics = field(default_factory=ClientMetrics)
    allow_stacked_corrections: bool = False  # permit several sides that edit gradients

    @property
    def untrained(self) -> set[str]:
        """The parameters that no phase trains: clients do not send them."""
        if self.local_training is None or self.server_model is None:
            return set()
        names = (name for name, _ in self.server_model.model.named_parameters())
        return self.local_training.untrained(names)

    def __post_init__(self) -> None:
        """Check the learning rate."""
        require_range("local.lr", self.local_lr, open_low=True)
