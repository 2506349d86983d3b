"""The arguments of a method's strategy."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, TypedDict

from fedhet.strategies.components.compression import Compression
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.staleness import Asynchronous
from fedhet.strategies.components.systems import ClientSystem
from fedhet.strategies.privacy.secure_aggregation import SecAggPlus
from fedhet.strategies.round.client_metrics import ClientMetrics
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


class Slots(TypedDict, total=False):
    """Arguments of every method's strategy besides its own: see FederatedStrategy."""

    aggregator: Aggregator
    server_optimizer: ServerOptimizer
    output: Output
    server_model: ServerModel
    sampler: ClientSampler
    system: ClientSystem | None
    asynchronous: Asynchronous | None
    transforms: Sequence[ReplyTransform]
    observers: Sequence[Observer]
    schedule: Schedule
    local_lr: float
    local_training: LocalTrainingConfig
    buffers: Collection[str]
    federation: FederationConfig
    evaluate_on_clients: bool
    client_metrics: ClientMetrics
    compression: Compression
    secure_aggregation: SecAggPlus | None


class KeepsArguments:
    """Keeps the constructor's arguments by name, those with defaults only if they were given.

    Attributes:
        arguments: by name.
    """

    arguments: Mapping[str, Any]

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Return an object with its arguments; a call that does not fit is a TypeError."""
        made = super().__new__(cls)
        bound = inspect.signature(cls).bind(*values, **named).arguments
        made.arguments = {**bound.pop("slots", {}), **bound}
        return made
