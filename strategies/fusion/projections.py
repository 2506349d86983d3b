"""Client half of MA-Echo and RegMean: projections onto the inputs of a network's layers.

For a layer y = W x with inputs X (n, d) (input_statistics.py) a client sends F (d, r) with
orthogonal columns; P = F F^T is symmetric with eigenvalues in [0, 1]:

    ridge      P = A (A + z I)^-1,   A = X^T X / n over all the client's examples,
               z in units of the mean eigenvalue of A (MA-Echo, Section 4)
    damped     P = I - N, N <- N - so k k^T / (zeta + x k), k = N x, starting at I, one step for the
               mean x of each mini-batch (MA-Echo's released code; so = 1 is the ridge form over the
               means, so = .5 removes half of each)

F keeps the r eigenvectors that hold ``energy`` of the sum of P's squared eigenvalues, or ``rank``
of them (Table 6). The client also sends each layer's scale z: with it the ridge form gives A back,
A = U diag(z p / (1 - p)) U^T, which RegMean needs. Layers wider than ``sketch_above`` have A
sketched in one pass, without a d x d matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, LocalContext, LocalOptimizer, LocalSummary, Payloads
from fedhet.strategies.fusion.input_statistics import (
    DampedProjector,
    SecondMoment,
    SketchedMoment,
    Spectrum,
    layers_of,
    mean_rows,
    numeric_padding,
    rows_of,
    width_of,
)
from fedhet.strategies.statistics.class_counts import CLASS_COUNTS, COUNTS, counted

PROJECTIONS, SCALES = "projections", "projection_scales"

Form = Literal["ridge", "damped"]
Ranks = int | Sequence[int | None] | None
Statistic = SecondMoment | SketchedMoment | DampedProjector


def bias_of(name: str) -> str:
    """Return the name of the bias that belongs to a weight."""
    return f"{name.removesuffix('weight')}bias"


def is_layer(name: str, param: Tensor) -> bool:
    """Return whether a tensor looks like a layer's weight, by its name and shape alone."""
    return name.endswith("weight") and param.dim() in (2, 4)


class ProjectionClient(ClientSide):
    """Sends the projection factors of its layers and its class counts after local training.

    The arguments are those of :class:`fedhet.strategies.fusion.projected_layers.Projections`.
    """

    sends, counts = frozenset({PROJECTIONS, SCALES, CLASS_COUNTS}), frozenset({COUNTS})
    by_class = True

    def __init__(
        self, form: Form, z: float, damping: float, rank: Ranks, energy: float, sketch_above: int
    ) -> None:
        self.form, self.z, self.damping = form, z, damping
        self.rank, self.energy, self.sketch_above = rank, energy, sketch_above

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse embeddings, grouped convolutions, and wide layers that cannot be sketched."""
        layers = layers_of(model)
        for name, param in model.named_parameters():
            if is_layer(name, param) and name not in layers:
                raise ConfigError(
                    "projections need linear or convolutional layers, and "
                    f"{name} belongs to another kind of layer: choose another task.model"
                )
        ranks = self.ranks(list(layers))
        for name, module in layers.items():
            if name in shared and module.bias is not None and bias_of(name) not in shared:
                raise ConfigError(
                    f"projections are of {name} together with its bias, and {bias_of(name)} is not "
                    "trained, or stays at the client: train and share both, or neither"
                )
            if isinstance(module, nn.Conv2d):
                numeric_padding(module)
                if module.groups > 1:
                    raise ConfigError(
                        f"{name} has {module.groups} groups, and projections are for convolutions "
                        "without groups: choose another task.model"
                    )
            width = width_of(module)
            if width > self.sketch_above and (self.form == "damped" or ranks[name] is None):
                raise ConfigError(
                    f"{name} has {width} inputs, more than strategy.projections.sketch_above="
                    f"{self.sketch_above}, and a sketch needs form=ridge and a rank: set "
                    "strategy.projections.rank, or raise sketch_above (memory: d x d numbers)"
                )

    def ranks(self, layers: Sequence[str]) -> dict[str, int | None]:
        """Return r of each layer, None where ``energy`` decides; refuse lists of other lengths."""
        if not isinstance(self.rank, Sequence):
            return dict.fromkeys(layers, self.rank)
        if len(self.rank) != len(layers):
            raise ConfigError(
                f"strategy.projections.rank={list(self.rank)} has {len(self.rank)} numbers, but "
                f"the model has {len(layers)} layers ({', '.join(layers)}): give one for each, or "
                "a single number"
            )
        return dict(zip(layers, self.rank, strict=True))

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Pass over the examples once; return factors, scales and class counts."""
        context.model.eval()
        layers = layers_of(context.model)
        ranks = self.ranks(list(layers))
        # personal layers stay at the client and are not fused
        layers = {name: module for name, module in layers.items() if name in context.anchor}
        statistics = {
            module: self._statistic(module, ranks[name], context) for name, module in layers.items()
        }
        damped = self.form == "damped"
        take = mean_rows if damped else rows_of
        batch, order = (64, context.generator) if damped else (500, None)

        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            statistics[module].add(take(module, inputs[0].float()))

        with ExitStack() as hooks:
            for module in layers.values():
                hooks.enter_context(module.register_forward_pre_hook(record))
            for inputs, _ in context.data.batches(batch, generator=order, train=False):
                context.model(inputs)
        factors, scales = {}, {}
        for name, module in layers.items():
            factors[name], scales[name] = self._projection(statistics[module], ranks[name])
        return {PROJECTIONS: factors, SCALES: scales, **counted(context)}

    def _statistic(self, module: nn.Module, rank: int | None, context: LocalContext) -> Statistic:
        width, device = width_of(module), next(iter(context.params.values())).device
        if self.form == "damped":
            # zeta of the released code: its lambda = .8 as exponent of 1e-5 and .01
            zeta = 1e-5**0.8 if isinstance(module, nn.Conv2d) else 0.01**0.8
            return DampedProjector(width, self.damping, zeta, device)
        if width > self.sketch_above:
            assert rank is not None
            return SketchedMoment(width, 2 * rank, context.generator, device)
        return SecondMoment(width, device)

    def _projection(self, statistic: Statistic, rank: int | None) -> tuple[Tensor, Tensor]:
        """Return F and the scale z (a scalar; 0 of the damped form)."""
        found, scale = statistic.spectrum(), torch.zeros(())
        if not isinstance(statistic, DampedProjector):
            scale = self.z * statistic.mean_eigenvalue()
            scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
            found = Spectrum(found.vectors, found.values / (found.values + scale))
        return found.factor(rank, self.energy), scale.float()
