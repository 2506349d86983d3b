"""What tests of client sides share."""

from typing import Any

from torch import nn

from fedhet.strategies.base import ClientSide, LocalOptimizer


def check_side(side: ClientSide, model: nn.Module, optimizer: LocalOptimizer | Any) -> None:
    """Let a side check a model of which all that is trained travels."""
    side.check(model, optimizer, [name for name, _ in model.named_parameters()])
