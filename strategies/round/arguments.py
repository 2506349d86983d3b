"""The arguments of a method's strategy."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self, TypedDict

from fedhet.common.errors import ConfigError, did_you_mean
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.modes.systems import ClientSystem
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
from fedhet.strategies.wire.compression import Compression


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


def refuse_slot(method: object, name: str, slots: Slots) -> None:
    """Refuse an argument for a slot that the method fills itself.

    Raises:
        ConfigError: if ``slots`` has it.
    """
    if name in slots:
        kind = type(method).__name__
        raise ConfigError(
            f"{kind}({name}={type(dict(slots)[name]).__name__}(...)) cannot be taken: {kind} has a "
            f"{name} of its own, which makes it the method; leave {name} out"
        )


class KeepsArguments:
    """Keeps the constructor's arguments by name, those with defaults only if they were given.

    Attributes:
        arguments: by name.
    """

    arguments: Mapping[str, Any]

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Return an object with its arguments; a call that does not fit is a TypeError."""
        made = super().__new__(cls)
        _require_known(cls, named)
        bound = inspect.signature(cls).bind(*values, **named).arguments
        made.arguments = {**bound.pop("slots", {}), **bound}
        return made


def _require_known(cls: type[KeepsArguments], named: Collection[str]) -> None:
    """Raise a TypeError that names the class if it, and those that it extends, lack an argument."""
    inits = [vars(kind)["__init__"] for kind in cls.__mro__[:-1] if "__init__" in vars(kind)]
    signatures = [inspect.signature(init).parameters for init in inits]
    if any(one.kind is one.VAR_KEYWORD and name != "slots" for name, one in signatures[0].items()):
        return  # a user's class, which takes what it likes
    own = [name for name in signatures[0] if name not in ("self", "slots")]
    known = {*Slots.__annotations__, *(name for one in signatures for name in one)}
    for name in named:
        if name not in known:
            options = list(dict.fromkeys([*own, *Slots.__annotations__]))
            raise TypeError(
                f"{cls.__name__} has no argument {name}{did_you_mean(name, options)}; it takes "
                f"{', '.join(options)}"
            )
