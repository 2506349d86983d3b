"""Linear CKA: how alike the clients' models represent the same examples, layer by layer.

Kornblith, Norouzi, Lee, Hinton: Similarity of neural network representations revisited. ICML 2019.
https://arxiv.org/abs/1905.00414 . FedPVR's Figure 2 has it between the models y_i of clients.

With X_i (n, p) the features of n examples in model i, its columns centred:

    CKA(i, j) = ||X_i' X_j||_F^2 / (||X_i' X_i||_F ||X_j' X_j||_F)

in [0, 1]; 1 where X_j is X_i rotated and scaled. The batches do not change it: what is kept are
sums over examples, of X and of X_i' X_j for all pairs: N^2 p^2 numbers a layer. A map (C, H, W)
counts with the mean over its positions, so p = C.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Tensors


class FeatureProducts:
    """The products of one layer's features between N models, summed over batches.

    Sums are in double precision, of features less the first batch's mean: what is common to all
    examples must not drown what differs.
    """

    def __init__(self) -> None:
        self.count = 0
        self._origin: Tensor | None = None

    def add(self, features: Tensor) -> None:
        """Take in a batch: features (N, B, p), of the same examples."""
        models, size, width = features.shape
        features = features.double()
        if self._origin is None:
            self._origin = features.mean(dim=1, keepdim=True)
            self._shape = models, width
            self._sums = features.new_zeros(models * width)
            self._products = features.new_zeros(models * width, models * width)
        rows = (features - self._origin).transpose(0, 1).reshape(size, models * width)
        self._sums += rows.sum(dim=0)
        self._products.addmm_(rows.T, rows)
        self.count += size

    def cka(self) -> Tensor:
        """Return linear CKA of every pair, (N, N); NaN where a model's features are constant."""
        models, width = self._shape
        centred = self._products - torch.outer(self._sums, self._sums) / self.count
        blocks = centred.view(models, width, models, width)
        squares = blocks.square().sum(dim=(1, 3))
        own = squares.diagonal().sqrt()
        found: Tensor = squares / torch.outer(own, own)
        return found


def layers_of(names: Sequence[str]) -> list[str]:
    """Return the names of the modules that hold these tensors, in their order, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


@torch.no_grad()
def similarities(
    model: nn.Module, clients: Sequence[Tensors], layers: Sequence[str], batches: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Return linear CKA between models at each layer's output, (N, N) by the layer's name.

    Args:
        model: the network; left as it was.
        clients: the N models' parameters and buffers, by name, on the network's device; what one
            does not name is the network's.
        layers: names of modules that give features (B, p) or maps (B, p, ...).
        batches: inputs (B, ...), the same examples for all models.
    """
    products = {layer: FeatureProducts() for layer in layers}
    model = copy.deepcopy(model).eval()
    found: dict[str, Tensor] = {}
    for layer in layers:
        model.get_submodule(layer).register_forward_hook(partial(_record, found, layer))
    for inputs in batches:
        by_client = []
        for tensors in clients:
            functional_call(model, dict(tensors), (inputs,))
            by_client.append(dict(found))
        for layer, sums in products.items():
            sums.add(torch.stack([features[layer] for features in by_client]))
    return {layer: sums.cka() for layer, sums in products.items()}


def _record(
    found: dict[str, Tensor], layer: str, module: nn.Module, inputs: object, output: object
) -> None:
    """Keep a layer's features (B, p), as a copy: the next module may work in place."""
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise ConfigError(
            f"diagnostics.cka selects a tensor of {layer}, a {type(module).__name__} that gives no "
            "features (B, p): leave it out"
        )
    found[layer] = output.flatten(2).mean(dim=2) if output.dim() > 2 else output.clone()
