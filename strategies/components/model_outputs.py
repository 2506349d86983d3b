"""Model outputs: which model a round evaluates, and the run stores as model.safetensors.

An output is a pure function (x_t as sent, Delta, x_{t+1}, replies) -> tensors, over the trainable
shared tensors; buffers are those of x_{t+1}. Clients go on training from x whichever it is. Round 0
gives the initial model; after a round with too few replies the last output stays.

An output may give another network than the task's (round/server_model.py), such as the ensemble
of the clients' models (strategies/ensemble.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedhet.common.configured import Option
from fedhet.strategies.base import Reads, Reply, Tensors


class _Output(Option):
    group = "strategy/output"


class Latest(_Output):
    """x_{t+1}, the model after the server's step."""

    option = "latest"
    reads = Reads.SUM

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> Tensors:
        """Return ``stepped`` itself: nothing is computed, stored or sent beside x."""
        return stepped


class LastTwo(_Output):
    """(x_t + x_{t+1}) / 2, the mean of the last two iterates (FedExP's released code)."""

    option = "last_two"
    reads = Reads.SUM

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return the mean."""
        return {name: 0.5 * (params[name] + new) for name, new in stepped.items()}


class Participants(_Output):
    """x_t + Delta, the mean of the participants' models where Delta is a mean of updates."""

    option = "participants"
    reads = Reads.SUM

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return the sum."""
        return {name: params[name] + update[name] for name in stepped}
