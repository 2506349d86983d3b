"""What tests of client sides, server sides and aggregators share."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from fedhet.strategies.base import (
    ClientSide,
    LocalOptimizer,
    Reply,
    ReplySum,
    ServerSide,
    Weighting,
)
from fedhet.strategies.round.reply_fold import Weights, sum_of, summed_payloads


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
