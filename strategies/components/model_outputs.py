"""Outputs: which model a round gives out. Clients go on training from x whichever it is.

An output is a pure function (x_t as sent, Delta, x_{t+1}, replies) -> tensors, over the trainable
shared tensors; buffers are those of x_{t+1}. What it gives is

    evaluated at the server, and at the clients where ``evaluation.clients`` asks for it
    stored as model.safetensors at the end

while x is what travels, what the clients say of the model they received, and what a checkpoint goes
on from. Round 0 gives out the initial model. After a round with too few replies what was given out
last stays; it is in the checkpoint for that reason, one more model, unless it is x itself.

An output may give out another network than the task's (server_model.py), as the ensemble of
the clients' models is (strategies/ensemble.py): then its tensors are all there is of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from strategies.base import Reply, Tensors


class Latest:
    """x_{t+1}, the model after the server's step."""

    reads_no_reply: Literal[True] = True

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> Tensors:
        """Return ``stepped`` itself: nothing is computed, stored or sent beside x."""
        return stepped


class LastTwo:
    """(x_t + x_{t+1}) / 2, the mean of the last two iterates (FedExP's released code)."""

    reads_no_reply: Literal[True] = True

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return the mean."""
        return {name: 0.5 * (params[name] + new) for name, new in stepped.items()}


class Participants:
    """x_t + Delta, the mean of the participants' models where Delta is a mean of updates.

    Where the server optimiser takes x there, too, it is what :class:`Latest` gives.
    """

    reads_no_reply: Literal[True] = True

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return the sum."""
        return {name: params[name] + update[name] for name in stepped}
