"""FedMA without retraining: federated learning with matched averaging, in one exchange.

Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni. ICLR 2020. https://arxiv.org/abs/2002.06440

PFNM's assignment (strategies/pfnm.py) for linear layers and convolutions, with channels as neurons,
from the inputs up. A neuron is its bias and its incoming weights from the matched neurons below, or
0 from a neuron that its client lacks. The classifier is the clients' mean, weighted in each class
by their shares of its examples. The grown network is the round's output model, as in PFNM.

In the paper clients retrain the layers above after each layer's matching, one exchange per layer.
This is the released code's one-exchange path, with its gamma = 7, which MA-Echo's paper (Table 4)
compares with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.common.kinds import Positive
from fedhet.strategies.base import Tensors
from fedhet.strategies.fusion.grown_network import GrownNetwork, Matching, spread
from fedhet.strategies.fusion.layer_chain import Link
from fedhet.strategies.fusion.projections import bias_of
from fedhet.strategies.parts import Parts


class MatchedAveraging(GrownNetwork):
    """FedMA's output model."""

    def matched(
        self, chain: Sequence[Link], models: Sequence[Tensors], shares: Tensor
    ) -> dict[str, Tensor]:
        """Match from the first hidden layer up to the last."""
        found: dict[str, Tensor] = {}
        below: list[Tensor | None] = [None] * len(models)
        size = models[0][chain[0].weight].shape[1]
        for link in chain[:-1]:
            layer = _weights(link, models, below, size)
            rows = [weight.flatten(1) for weight in layer]
            width, name = rows[0].shape[1], bias_of(link.weight)
            if link.has_bias:
                biases = [model[name][:, None] for model in models]
                rows = [torch.cat(parts, dim=1) for parts in zip(rows, biases, strict=True)]
            scales = shares.new_ones(len(models), rows[0].shape[1])
            labels, neurons = self.match(link, rows, width, scales)
            found[link.weight] = neurons[:, :width].reshape(len(neurons), *layer[0].shape[1:])
            if link.has_bias:
                found[name] = neurons[:, width]
            below, size = list(labels), len(neurons)
        head = chain[-1]
        weights = torch.stack(_weights(head, models, below, size))
        found[head.weight] = torch.einsum("jc,jcd->cd", shares, weights)
        if head.has_bias:
            name = bias_of(head.weight)
            found[name] = (shares * torch.stack([model[name] for model in models])).sum(0)
        return found


def _weights(
    link: Link, models: Sequence[Tensors], below: Sequence[Tensor | None], size: int
) -> list[Tensor]:
    """Return the clients' weights on the global neurons of the layer below, in a weight's shape."""
    found = []
    for model, labels in zip(models, below, strict=True):
        weight = model[link.weight]
        if weight.dim() == 2 and link.block > 1:  # a flattened image
            blocks = weight.view(len(weight), -1, link.block)
            found.append(spread(blocks, labels, size).flatten(1))
        else:
            found.append(spread(weight, labels, size))
    return found


class FedMA(Matching):
    """FedMA (Wang et al. 2020): one round, without its retraining; matches neurons and channels as
    PFNM does, layer by layer from the inputs up.
    """

    gamma: Positive = 7.0
    """mass of the process: how readily neurons become new ones"""

    def parts(self) -> Parts:
        """Match the neurons, layer by layer."""
        return self.matching_parts(MatchedAveraging)
