"""What tests of client sides, server sides and aggregators share."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from torch import nn

from fedhet.common.configured import fields as parameters
from fedhet.strategies.base import (
    ClientSide,
    LocalOptimizer,
    Reply,
    ReplySum,
    ServerSide,
    Weighting,
)
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fedsam import SAM
from fedhet.strategies.method import Method, MethodPart
from fedhet.strategies.parts import Parts, Setup
from fedhet.strategies.per_fedavg import Order, PerFedAvgOptimizer
from fedhet.strategies.round.reply_fold import Weights, sum_of, summed_payloads

PARTS, SETUP = ({one.name for one in fields(kind)} for kind in (Parts, Setup))


def built(kind: type[FederatedStrategy] = FederatedStrategy, /, **given: Any) -> FederatedStrategy:
    """Return a strategy; its own parameters and those of Parts and of Setup are given together."""
    method = issubclass(kind, Method)
    own = {name for name in given if method and name in parameters(kind)}
    parts = Parts(**{name: given[name] for name in given.keys() & PARTS - own})
    setup = Setup(**{name: given[name] for name in given.keys() & SETUP - own})
    rest = {name: given[name] for name in given if name in own or name not in PARTS | SETUP}
    return kind(**rest, options=parts, setup=setup) if method else kind(parts, setup, **rest)


def parts_of(kind: type[MethodPart], /, **given: Any) -> Parts:
    """Return a method's parts, without a strategy of them."""
    return (kind.unbound(given) if issubclass(kind, Method) else kind(**given)).all_parts()


def client_side(kind: type[MethodPart], /, **given: Any) -> Any:
    """Return the client half of a method."""
    return parts_of(kind, **given).client_sides[kind.name]


def server_side(kind: type[MethodPart], /, **given: Any) -> Any:
    """Return the server half of a method."""
    return parts_of(kind, **given).server_sides[kind.name]


def sam(rho: float, weight_decay: float = 0.0, *, adaptive: bool = False) -> SAM:
    """Return SAM's optimizer without momentum."""
    return SAM(rho=rho, weight_decay=weight_decay, adaptive=adaptive)


def per_fedavg(
    alpha: float = 0.01, order: Order = "first", delta: float = 1e-3, *, same_batch: bool = False
) -> PerFedAvgOptimizer:
    """Return Per-FedAvg's optimizer."""
    return PerFedAvgOptimizer(alpha=alpha, order=order, delta=delta, same_batch=same_batch)


def check_side(side: ClientSide, model: nn.Module, optimizer: LocalOptimizer | Any) -> None:
    """Let a side check a model of which all that is trained travels."""
    side.check(model, optimizer, [name for name, _ in model.named_parameters()])


def total_of(replies: Sequence[Reply], weighting: Weighting = "clients") -> ReplySum:
    """Return the sum of replies and of all that they send."""
    return sum_of(replies, Weights(weighting), replies[0].payloads.keys())


def released(side: ServerSide, replies: Sequence[Reply]) -> ReplySum:
    """Return what a server side makes of replies of equal weight."""
    payloads = {*replies[0].payloads, *summed_payloads({"side": side})}
    return side.release(sum_of(side.receive({}, replies), Weights("clients"), payloads))
