"""The products B A of LoRA's adapters at the server, for methods that average them exactly.

With W + (alpha / r) B A in the place of a weight, the mean of the clients' models has

    W + (alpha / r) sum_i p_i B_i A_i,    p_i = n_i / sum_j n_j

and not (alpha / r) (sum_i p_i B_i) (sum_i p_i A_i). The first sum is not of the adapters' rank, so
it goes into W itself, which ``task.lora.share_base`` makes a tensor of the model: it travels to the
clients, which leave it as it is (``strategy.phases``) and do not send it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    ClientSide,
    LocalOptimizer,
    Reads,
    Reply,
    Tensors,
    Weighting,
    local_model,
)
from fedhet.strategies.round.reply_fold import Weights, sum_of
from fedhet.strategies.round.server_model import ServerModel

BASE = ".base_layer.weight"  # end of the name of W
_PHASES = [{"layers": f"not:*{BASE}", "epochs": None}]
SHARED_BASE = MappingProxyType({"task.lora.share_base": True, "strategy.phases": _PHASES})


class SentAdapters(ClientSide):
    """Refuses adapters that stay at the clients."""

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse an adapter that is not among the trainable tensors that are sent."""
        adapters = [name for name, _ in model.named_parameters() if ".lora_" in name]
        if missing := sorted({*adapters} - {*shared}):
            raise ConfigError(
                f"strategy=flora and fedex_lora need A and B of every adapter, and {missing[0]} "
                "stays at the clients (strategy.personal): drop the method that keeps it there"
            )


class AdapterProducts:
    """Aggregates whole products; a subclass says what becomes of W and the adapters."""

    reads = Reads.MODELS
    weighs: ClassVar[Weighting] = "examples"

    def bind(self, network: ServerModel) -> None:
        """Find the layers with adapters, peft's.

        Raises:
            ConfigError: if there are none, or their weights do not travel.
        """
        model: Any = network.model
        modules = dict(model.named_modules())
        self._layers = {n: one for n, one in modules.items() if hasattr(one, "get_delta_weight")}
        known = {name for name, _ in model.named_parameters()}
        if not self._layers or {f"{path}{BASE}" for path in self._layers} - known:
            raise ConfigError(
                "strategy=flora and fedex_lora need adapters, and their weights as tensors of the "
                "model: set task.lora and task.lora.share_base=true"
            )

    @torch.no_grad()
    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return Delta."""
        total = sum(reply.num_examples for reply in replies)
        shares = [reply.num_examples / total for reply in replies]
        mean = dict(sum_of(replies, Weights("examples")).update)
        models = [local_model(params, reply) for reply in replies]
        products = {f"{path}{BASE}": self._mean(path, shares, models) for path in self._layers}
        changes = {**mean, **self.changes(params, mean, products)}
        for path in self._layers:  # the server's model holds x again
            self.product(path, params)
        return changes

    def changes(self, params: Tensors, mean: Tensors, products: Tensors) -> dict[str, Tensor]:
        """Return where Delta differs from the mean update.

        ``products`` are (alpha / r) sum_i p_i B_i A_i, by the name of W.
        """
        raise NotImplementedError

    def product(self, path: str, tensors: Tensors) -> Tensor:
        """Return (alpha / r) B A of a layer, from a model's tensors."""
        layer = self._layers[path]
        for name, value in layer.named_parameters():
            if name.startswith("lora_"):
                value.data.copy_(tensors[f"{path}.{name}"])
        found: Tensor = layer.get_delta_weight("default")
        return found.detach().to("cpu", copy=True)

    def _mean(self, path: str, shares: Sequence[float], models: Iterable[Tensors]) -> Tensor:
        parts = (p * self.product(path, one) for p, one in zip(shares, models, strict=True))
        return torch.stack(list(parts)).sum(0)
