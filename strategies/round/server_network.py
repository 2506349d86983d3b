"""The network at the server, for the few slots that run it and not only reckon with its tensors.

Such a slot has a method ``bind`` (:class:`RunsNetwork`), called once before round 1: an ensemble,
or a student that is distilled from the clients' models. An output that gives out another network
than the task's says how to make it of the tensors (:class:`GivesNetwork`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from strategies.base import Reply, Tensors


@dataclass(frozen=True)
class Network:
    """The task's network.

    Attributes:
        model: ``forward`` returns (features, logits). While the slots of a round are called it
            holds what was sent to the round's clients, buffers included; in between, anything.
        input_shape: (C, H, W) of an image, (T,) of a text.
        num_classes: C.
        black: what a pixel of 0 is as an input, by channel (C,); None where inputs are no images.
        white: the same of a pixel of 1.
    """

    model: nn.Module
    input_shape: tuple[int, ...]
    num_classes: int
    black: Tensor | None = None
    white: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Copy tensors into the model; those that are not named stay as they are."""
        state = self.model.state_dict()
        for name, value in tensors.items():
            state[name].copy_(value)

    def trained(self, reply: Reply) -> dict[str, Tensor]:
        """Return a client's model y_i, buffers included, by name, where the model is."""
        sent = self.model.state_dict()
        changes = {**reply.update, **reply.buffers}
        return {name: sent[name] + change.to(self.device) for name, change in changes.items()}


@runtime_checkable
class RunsNetwork(Protocol):
    """An aggregator, an output, a server side or an observer that runs the network."""

    def bind(self, network: Network) -> None:
        """Take the network; called once, before round 1."""


@runtime_checkable
class GivesNetwork(Protocol):
    """An output whose tensors, all of them, are those of another network than the task's."""

    def network(self, tensors: Tensors) -> nn.Module:
        """Return that network, with what the output has given out in it."""
