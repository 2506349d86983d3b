"""The task's model at the server, for parts that run it or read its shapes.

Such a part has a method ``bind`` (:class:`UsesServerModel`), called once before round 1. An output
with another architecture than the task's builds its own model (:class:`BuildsOutputModel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fedhet.strategies.base import Reply, Tensors


@dataclass(frozen=True)
class ServerModel:
    """The task's model and the shape of its inputs.

    During a server step ``model`` holds the tensors that were sent to the round's clients, buffers
    included; at other times, anything.
    """

    model: nn.Module  # ``forward`` returns (features, logits)
    input_shape: tuple[int, ...]  # (C, H, W) of an image, (T,) of a text
    num_classes: int
    black: Tensor | None = None  # input of a pixel of 0, by channel (C,); None: not images
    white: Tensor | None = None  # input of a pixel of 1

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Copy tensors into the model; tensors that are not named stay unchanged."""
        state = self.model.state_dict()
        for name, value in tensors.items():
            state[name].copy_(value)

    def trained(self, reply: Reply) -> dict[str, Tensor]:
        """Return a client's tensors y_i by name, buffers included, on the model's device."""
        sent = self.model.state_dict()
        changes = {**reply.update, **reply.buffers}
        return {name: sent[name] + change.to(self.device) for name, change in changes.items()}


@runtime_checkable
class UsesServerModel(Protocol):
    """An aggregator, output, server side or observer that needs the model."""

    def bind(self, server_model: ServerModel, /) -> None:
        """Keep the model; called once, before round 1."""


@runtime_checkable
class BuildsOutputModel(Protocol):
    """An output with another architecture than the task's."""

    def build_model(self, tensors: Tensors, /) -> nn.Module:
        """Return that model, loaded with the output's tensors."""
