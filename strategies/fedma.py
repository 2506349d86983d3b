"""FedMA without retraining: federated learning with matched averaging, in one exchange.

Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni. ICLR 2020. https://arxiv.org/abs/2002.06440

PFNM's assignment (strategies/pfnm.py) for convolutions, too, with channels as neurons, and from the
inputs up: a neuron is its incoming weights and its bias, as the neurons of the layer below are
matched already; 0 from those of them that its client has no copy of. The classifier is the clients'
mean, weighted in each class by their shares of its examples. The grown network is an output, as
PFNM's.

In the paper clients train the layers above anew after each layer's matching, one exchange a layer,
and that makes it work: MA-Echo's paper (Table 4) reports 11 to 37 % on CIFAR-10 for what it calls
FedMA in one exchange, where the plain mean has 15 to 71. This is that: the released code's own
one-exchange path, with its gamma = 7. On the cases measured in strategies/pfnm.py it gives 10.1,
52.3 / 72.8, 71.1 / 73.2, 94.6 / 96.5, and with sigma .1, sigma0 10, gamma 50, on layers of up to
648-524-384 neurons, 66.3, 89.5 / 85.9, 95.4 / 84.5, 96.6 / 96.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from strategies.base import Tensors
from strategies.fusion.layer_chain import Chain, Link
from strategies.fusion.projected_layers import bias_of
from strategies.pfnm import GrownNetwork, patched
from strategies.round.federated import FederatedStrategy, Slots
from strategies.statistics.class_counts import ClassCountsClient, ClassCountsServer


class MatchedAveraging(GrownNetwork):
    """FedMA's output; the arguments are those of :class:`GrownNetwork`."""

    def __init__(
        self,
        sigma: float = 1.0,
        sigma0: float = 1.0,
        gamma: float = 7.0,
        most: int = 700,
        sweeps: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__("strategy.fedma", sigma, sigma0, gamma, most, sweeps, seed)

    def matched(
        self, chain: Sequence[Link], models: Sequence[Tensors], shares: Tensor
    ) -> dict[str, Tensor]:
        """Match from the first hidden layer up to the last."""
        found: dict[str, Tensor] = {}
        below: list[Tensor | None] = [None] * len(models)
        size = models[0][chain[0].weight].shape[1]
        for link in chain[:-1]:
            weights = _spread(link, models, below, size)
            rows = [weight.flatten(1) for weight in weights]
            width, name = rows[0].shape[1], bias_of(link.weight)
            if link.has_bias:
                biases = [model[name][:, None] for model in models]
                rows = [torch.cat(parts, dim=1) for parts in zip(rows, biases, strict=True)]
            scales = shares.new_ones(len(models), rows[0].shape[1])
            labels, neurons = self.match(link, rows, width, scales)
            found[link.weight] = neurons[:, :width].reshape(len(neurons), *weights[0].shape[1:])
            if link.has_bias:
                found[name] = neurons[:, width]
            below, size = list(labels), len(neurons)
        return found | _mean_classifier(chain[-1], models, below, size, shares)


def _spread(
    link: Link, models: Sequence[Tensors], below: Sequence[Tensor | None], size: int
) -> list[Tensor]:
    """Return the clients' weights on the global neurons of the layer below, in a weight's shape."""
    found = []
    for model, labels in zip(models, below, strict=True):
        weight = model[link.weight]
        if weight.dim() == 2 and link.block > 1:  # a flattened image
            blocks = weight.view(len(weight), -1, link.block)
            found.append(patched(blocks, labels, size).flatten(1))
        else:
            found.append(patched(weight, labels, size))
    return found


def _mean_classifier(
    head: Link,
    models: Sequence[Tensors],
    below: Sequence[Tensor | None],
    size: int,
    shares: Tensor,
) -> dict[str, Tensor]:
    weights = torch.stack(_spread(head, models, below, size))
    found = {head.weight: torch.einsum("jc,jcd->cd", shares, weights)}
    if head.has_bias:
        name = bias_of(head.weight)
        found[name] = (shares * torch.stack([model[name] for model in models])).sum(0)
    return found


class FedMA(FederatedStrategy):
    """One round whose output is the grown network; takes ``server_model=ServerModel(...)``.

    Args:
        output: :class:`MatchedAveraging`; by default with the released code's numbers.
        slots: of :class:`FederatedStrategy`; ``server_model`` is required.
    """

    def __init__(self, **slots: Unpack[Slots]) -> None:
        slots.setdefault("output", MatchedAveraging())
        super().__init__(
            client_sides={"chain": Chain(), "class_counts": ClassCountsClient()},
            server_sides={"class_counts": ClassCountsServer()},
            **slots,
        )
