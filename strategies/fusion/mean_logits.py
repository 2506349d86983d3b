"""The mean of the logits of many models, plain or masked by their clients' classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Reply, Tensors
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import CLASS_COUNTS, holder_shares


class MeanLogits(nn.Module):
    """A network whose logits are the weighted means of many models' logits.

    ``model`` computes with each of the states; its own tensors fill in for missing ones. ``shares``
    are the weight of each model's logit of each class (N, C).
    """

    shares: Tensor

    def __init__(self, model: nn.Module, states: Sequence[Tensors], shares: Tensor) -> None:
        super().__init__()
        self.model = model
        self.states = list(states)
        self.register_buffer("shares", shares)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, N, d), those of every model, and logits (B, C)."""
        answers = [functional_call(self.model, dict(state), (inputs,)) for state in self.states]
        features = torch.stack([features for features, _ in answers], dim=1)
        logits = torch.stack([logits for _, logits in answers], dim=1)
        return features, (logits * self.shares).sum(1)


def mean_logits(network: ServerModel, replies: Sequence[Reply], *, masked: bool) -> MeanLogits:
    """Return the ensemble of the replies' models, in eval mode."""
    shares = class_shares(replies, network.num_classes, masked=masked).to(network.device)
    states = [network.trained(reply) for reply in replies]
    return MeanLogits(network.model, states, shares).eval()


def require_logits(what: str, network: ServerModel) -> None:
    """Refuse a network that does not classify (``classifies`` is False, as of a CVAE)."""
    if not getattr(network.model, "classifies", True):
        raise ConfigError(
            f"{what} averages logits, and {type(network.model).__name__} has none: choose another "
            "task.model or another strategy"
        )


def class_shares(replies: Sequence[Reply], num_classes: int, *, masked: bool) -> Tensor:
    """Return the weight of each client's logit of each class (N, C)."""
    if not masked:
        return torch.full((len(replies), num_classes), 1.0 / len(replies))
    if any(CLASS_COUNTS not in reply.payloads for reply in replies):
        raise ConfigError(
            "a masked ensemble needs the clients' class counts, but they send none: set "
            "strategy.ensemble.masked=false"
        )
    return holder_shares(replies)
