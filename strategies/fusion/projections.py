"""Projections onto the inputs of a network's layers, as factors: the client half of MA-Echo.

For a layer y = W x, x a row of its inputs (the patches, for a convolution; with a 1 behind it where
the layer has a bias, so that [W | b] is its weight), a client sends F (d, r), the columns of which
are orthogonal, and P = F F^T is symmetric with eigenvalues in [0, 1]:

    ridge      P = A (A + z I)^-1,   A = X^T X / n over all rows X (n, d) of the client's examples,
               z in units of the mean eigenvalue of A (MA-Echo, Section 4)
    damped     P = I - N, N <- N - so k k^T / (zeta + x k), k = N x, starting at I, one step for the
               mean x of each mini-batch (MA-Echo's released code; so = 1 is the ridge form over the
               means, so = .5 removes half of each)

Both are eigendecomposed, and those r columns kept that hold ``energy`` of the sum of P's squared
eigenvalues, or ``rank`` of them (Table 6). Beside F goes the scale z of each layer: with it the
ridge form gives A back, A = U diag(z p / (1 - p)) U^T, which RegMean needs.

A layer that is wider than ``sketch_above`` has no d x d matrix: A is sketched in one pass over the
rows, Y = A Omega with Omega (d, 2 r) Gaussian, and approximated from it (the fixed-rank Nystrom
approximation of Tropp, Yurtsever, Udell, Cevher, NeurIPS 2017, https://arxiv.org/abs/1706.05736).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from common.errors import ConfigError, require_range, require_whole
from strategies.base import ClientSide, LocalContext, LocalOptimizer, LocalSummary, Payloads
from strategies.statistics.class_counts import CLASS_COUNTS, counted

PROJECTIONS, SCALES = "projections", "projection_scales"

_EPS = torch.finfo(torch.float32).eps


# ---- rows ----------------------------------------------------------------------------------------


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear and convolutional layers by the names of their weights."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def is_layer(name: str, param: Tensor) -> bool:
    """Return whether a tensor looks like a layer's weight, by its name and shape alone."""
    return name.endswith("weight") and param.dim() in (2, 4)


def rows_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the rows (n, d) that the layer multiplies with its weight; with bias, a 1 behind each.

    Args:
        module: linear or convolutional.
        inputs: what the layer was given.
    """
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(
            inputs, module.kernel_size, module.dilation, _padding(module), module.stride
        )
        rows = patches.transpose(1, 2).flatten(0, 1)
    else:
        rows = inputs.flatten(0, -2)
    return rows if module.bias is None else F.pad(rows, (0, 1), value=1.0)


def mean_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the rows (m, d) of the mini-batch's mean input, as the released code takes them.

    One for a linear layer; for a convolution the patches of the mean image at stride 2 without
    padding, whatever the layer's own are.
    """
    mean = inputs.mean(dim=0, keepdim=True)
    if isinstance(module, nn.Conv2d):
        rows = F.unfold(mean, module.kernel_size, stride=2).transpose(1, 2).flatten(0, 1)
    else:
        rows = mean.flatten(0, -2)
    return rows if module.bias is None else F.pad(rows, (0, 1), value=1.0)


def _padding(module: nn.Conv2d) -> tuple[int, ...]:
    if isinstance(module.padding, str):
        raise ConfigError(f"a convolution with padding={module.padding!r}: give it as numbers")
    return module.padding


# ---- statistics of rows --------------------------------------------------------------------------


@dataclass(frozen=True)
class Spectrum:
    """Eigenvectors (d, r) and eigenvalues (r,), the largest first, of a matrix (d, d)."""

    vectors: Tensor
    values: Tensor


def spectrum(matrix: Tensor) -> Spectrum:
    """Return the eigendecomposition of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return Spectrum(vectors.flip(1), values.flip(0).clamp_min(0.0))


class SecondMoment:
    """A = X^T X / n, held as it is.

    Args:
        width: d.
        device: where.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.sum = torch.zeros(width, width, device=device, dtype=torch.float64)
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Take in rows (n, d)."""
        self.sum += (rows.T @ rows).double()
        self.count += len(rows)

    def mean_eigenvalue(self) -> Tensor:
        """Return the trace over d."""
        return self.sum.diagonal().mean() / self.count

    def spectrum(self) -> Spectrum:
        """Return the eigendecomposition of A."""
        return spectrum(self.sum / self.count)


class SketchedMoment:
    """A = X^T X / n, as far as a sketch of ``size`` columns knows it.

    Args:
        width: d.
        size: columns of the sketch, at most d.
        generator: draws the test matrix.
        device: where.
    """

    def __init__(
        self, width: int, size: int, generator: torch.Generator, device: torch.device
    ) -> None:
        drawn = torch.randn(width, min(size, width), generator=generator, dtype=torch.float64)
        self.test = torch.linalg.qr(drawn).Q.float().to(device)
        self.sketch = torch.zeros_like(self.test, dtype=torch.float64)
        self.trace = torch.zeros((), device=device, dtype=torch.float64)
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Take in rows (n, d)."""
        self.sketch += (rows.T @ (rows @ self.test)).double()
        self.trace += rows.square().sum().double()
        self.count += len(rows)

    def mean_eigenvalue(self) -> Tensor:
        """Return the trace over d, which needs no sketch."""
        return self.trace / (self.count * len(self.test))

    def spectrum(self) -> Spectrum:
        """Return the Nystrom approximation's eigendecomposition (Tropp et al., Algorithm 3)."""
        test = self.test.double()
        shift = _EPS * self.sketch.norm().clamp_min(torch.finfo(torch.float64).tiny)
        shifted = self.sketch + shift * test
        core = test.T @ shifted
        root = torch.linalg.cholesky((core + core.T) / 2)
        half = torch.linalg.solve_triangular(root.T, shifted, upper=True, left=False)
        vectors, values, _ = torch.linalg.svd(half, full_matrices=False)
        return Spectrum(vectors, (values.square() - shift).clamp_min(0.0) / self.count)


class DampedProjector:
    """The released code's recursion.

    Args:
        width: d.
        step: so, how much of each direction a step removes, in (0, 1].
        zeta: what keeps a small row from counting like a long one.
        device: where.
    """

    def __init__(self, width: int, step: float, zeta: float, device: torch.device) -> None:
        self.null = torch.eye(width, device=device)
        self.step, self.zeta = step, zeta

    def add(self, rows: Tensor) -> None:
        """Take a step for each row, in their order."""
        for row in rows:
            gain = self.null @ row
            self.null -= self.step * torch.outer(gain, gain) / (self.zeta + row @ gain)

    def spectrum(self) -> Spectrum:
        """Return the eigendecomposition of P = I - N."""
        projector = torch.eye(len(self.null), device=self.null.device) - self.null
        found = spectrum(projector.double())
        return Spectrum(found.vectors, found.values.clamp_max(1.0))


def factor(found: Spectrum, rank: int | None, energy: float) -> Tensor:
    """Return F (d, r) of the matrix, its columns the eigenvectors times the root of the value.

    Args:
        found: of the matrix.
        rank: r, or None: as many as hold ``energy`` of the sum of the squared eigenvalues.
        energy: in (0, 1].
    """
    if rank is None:
        held = found.values.square().cumsum(0)
        enough = energy * held[-1] * (1 - 1e-12)
        rank = int((held < enough).sum()) + 1
    kept = slice(0, min(rank, len(found.values)))
    return (found.vectors[:, kept] * found.values[kept].sqrt()).float()


# ---- the client half -----------------------------------------------------------------------------


class ProjectionClient(ClientSide):
    """Sends the projection factors of its layers, and its class counts, once it has trained.

    Args:
        form: "ridge" or "damped".
        z: of the ridge form, in units of the mean eigenvalue of A, > 0.
        damping: so of the damped form, in (0, 1].
        rank: r of every layer, or a list with that of each, from the inputs on and with the
            classifier; None: by ``energy``.
        energy: share of P's squared eigenvalues to keep, in (0, 1].
        sketch_above: layers with more inputs are sketched; they need a ``rank``.
        dense: send P (d, d) itself in place of F.
    """

    sends = frozenset({PROJECTIONS, SCALES, CLASS_COUNTS})

    def __init__(
        self,
        form: Literal["ridge", "damped"] = "ridge",
        z: float = 1.0,
        damping: float = 0.5,
        rank: int | Sequence[int | None] | None = None,
        energy: float = 1.0,
        sketch_above: int = 2304,
        dense: bool = False,
    ) -> None:
        key = "strategy.projections"
        if form not in ("ridge", "damped"):
            raise ConfigError(f"{key}.form={form!r} is not allowed: it must be ridge or damped")
        self.form = form
        self.z = require_range(f"{key}.z", z, open_low=True)
        self.damping = require_range(f"{key}.damping", damping, high=1.0, open_low=True)
        self.rank: int | list[int | None] | None
        if isinstance(rank, Sequence):
            self.rank = [_checked(one) for one in rank]
        else:
            self.rank = _checked(rank)
        self.energy = require_range(f"{key}.energy", energy, high=1.0, open_low=True)
        self.sketch_above = require_whole(f"{key}.sketch_above", sketch_above, low=1)
        self.dense = dense

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse grouped convolutions, wide layers that cannot be sketched, and embeddings."""
        layers = layers_of(model)
        for name, param in model.named_parameters():
            if is_layer(name, param) and name not in layers:
                raise ConfigError(
                    f"projections are of linear layers and convolutions, and {name} is another "
                    "layer's weight: choose another task.model"
                )
        ranks = self.ranks(list(layers))
        for name, module in layers.items():
            if isinstance(module, nn.Conv2d) and module.groups > 1:
                raise ConfigError(
                    f"{name} has {module.groups} groups; projections are for convolutions without: "
                    "choose another task.model"
                )
            width = width_of(module)
            if width > self.sketch_above and (self.form == "damped" or ranks[name] is None):
                raise ConfigError(
                    f"{name} has {width} inputs, more than strategy.projections.sketch_above="
                    f"{self.sketch_above}, so it is sketched, which takes form=ridge and a rank: "
                    "set strategy.projections.rank, or sketch_above higher (it costs d x d numbers)"
                )
            if isinstance(module, nn.Conv2d):
                _padding(module)

    def ranks(self, layers: Sequence[str]) -> dict[str, int | None]:
        """Return r of each layer, None where ``energy`` decides.

        Raises:
            ConfigError: where ``rank`` is a list of another length.
        """
        if not isinstance(self.rank, list):
            return dict.fromkeys(layers, self.rank)
        if len(self.rank) != len(layers):
            raise ConfigError(
                f"strategy.projections.rank={self.rank} has {len(self.rank)} numbers, but the "
                f"model {len(layers)} layers: {', '.join(layers)}; give one for each, or a number"
            )
        return dict(zip(layers, self.rank, strict=True))

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Pass over the examples once; return factors, scales and counts."""
        context.model.eval()
        layers = layers_of(context.model)
        ranks = self.ranks(list(layers))
        # what stays at the client is not fused, and needs no projection
        layers = {name: module for name, module in layers.items() if name in context.anchor}
        statistics = {
            name: self._statistic(module, ranks[name], context) for name, module in layers.items()
        }
        take = mean_rows if self.form == "damped" else rows_of
        batch, order = (64, context.generator) if self.form == "damped" else (500, None)
        with recording(layers, lambda n, i: statistics[n].add(take(layers[n], i.float()))):
            for inputs, _ in context.data.batches(batch, generator=order, train=False):
                context.model(inputs)
        found = {
            name: self._projection(statistic, ranks[name]) for name, statistic in statistics.items()
        }
        return {
            PROJECTIONS: {name: self._sent(values) for name, (values, _) in found.items()},
            SCALES: {name: scale for name, (_, scale) in found.items()},
            **counted(context),
        }

    def _statistic(
        self, module: nn.Module, rank: int | None, context: LocalContext
    ) -> SecondMoment | SketchedMoment | DampedProjector:
        width, device = width_of(module), next(iter(context.params.values())).device
        if self.form == "damped":
            # the released constants: lambda = .8, of .01 and of 1e-5
            zeta = 1e-5**0.8 if isinstance(module, nn.Conv2d) else 0.01**0.8
            return DampedProjector(width, self.damping, zeta, device)
        if width > self.sketch_above:
            assert rank is not None
            return SketchedMoment(width, 2 * rank, context.generator, device)
        return SecondMoment(width, device)

    def _projection(
        self, statistic: SecondMoment | SketchedMoment | DampedProjector, rank: int | None
    ) -> tuple[Tensor, Tensor]:
        """Return F and the scale z (a scalar; 0 where the form has none)."""
        found = statistic.spectrum()
        scale = torch.zeros(())
        if not isinstance(statistic, DampedProjector):
            mean = statistic.mean_eigenvalue().clamp_min(torch.finfo(torch.float32).tiny)
            scale = self.z * mean
            found = Spectrum(found.vectors, found.values / (found.values + scale))
        return factor(found, rank, self.energy), scale.float()

    def _sent(self, values: Tensor) -> Tensor:
        return values @ values.T if self.dense else values


def _checked(rank: int | None) -> int | None:
    return None if rank is None else require_whole("strategy.projections.rank", rank, low=1)


def width_of(module: nn.Module) -> int:
    """Return d: the inputs of a layer's weight, and one for a bias."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel() + (module.bias is not None)


@contextmanager
def recording(
    layers: Mapping[str, nn.Module], record: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Call ``record(name, inputs)`` whenever a layer is used inside the block."""
    handles = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: record(name, inputs[0]))
        for name, module in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
