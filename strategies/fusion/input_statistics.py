"""Statistics of the inputs of a network's layers, and their eigendecompositions.

The rows (n, d) of a layer are the inputs that it multiplies with its weight: the patches, for a
convolution, with a 1 appended where the layer has a bias, so that [W | b] is its weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.common.errors import ConfigError

_EPS = torch.finfo(torch.float32).eps
_BLOCK = 256  # columns

Sides = tuple[int, ...]  # two: of the height and of the width


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear and convolutional layers by the names of their weights."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def width_of(module: nn.Module) -> int:
    """Return d: the inputs of a layer's weight, plus one for a bias."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight[0].numel() + (module.bias is not None)


def rows_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the rows (n, d) of a linear or convolutional layer's inputs."""
    if isinstance(module, nn.Conv2d):
        rows = _patches(inputs, module, numeric_padding(module), module.dilation, module.stride)
    else:
        rows = inputs.flatten(0, -2)
    return rows if module.bias is None else F.pad(rows, (0, 1), value=1.0)


def _patches(
    images: Tensor, module: nn.Conv2d, padding: Sides, dilation: Sides, stride: Sides
) -> Tensor:
    """Return the patches of images (n, c, h, w) as rows (n h' w', c kh kw).

    They are F.unfold's columns, which a view lays out in one copy in place of two.
    """
    height, width = padding
    padded, kernel = F.pad(images, (width, width, height, height)), module.kernel_size
    number, channels, *sizes = padded.shape
    image, channel, *pixels = padded.stride()
    starts = [
        (size - spread * (side - 1) - 1) // step + 1
        for size, side, spread, step in zip(sizes, kernel, dilation, stride, strict=True)
    ]
    between = [pixel * step for pixel, step in zip(pixels, stride, strict=True)]
    within = [pixel * spread for pixel, spread in zip(pixels, dilation, strict=True)]
    patches = padded.as_strided(
        (number, *starts, channels, *kernel), (image, *between, channel, *within)
    )
    return patches.reshape(number * starts[0] * starts[1], -1)


def mean_rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the rows (m, d) of the mini-batch's mean input, as in MA-Echo's released code.

    A convolution has the patches of the mean image at stride 2, unpadded, whatever its settings;
    padded only where the image is smaller than the kernel, which that code cannot have.
    """
    mean = inputs.mean(dim=0, keepdim=True)
    if isinstance(module, nn.Conv2d):
        fits = all(side >= k for side, k in zip(mean.shape[2:], module.kernel_size, strict=True))
        rows = _patches(mean, module, (0, 0) if fits else numeric_padding(module), (1, 1), (2, 2))
    else:
        rows = mean.flatten(0, -2)
    return rows if module.bias is None else F.pad(rows, (0, 1), value=1.0)


def numeric_padding(module: nn.Conv2d) -> Sides:
    """Return a convolution's padding with zeros, in numbers; raise ConfigError for another."""
    if isinstance(module.padding, str):
        raise ConfigError(
            f"a convolution has padding={module.padding!r}, and projections need it in numbers: "
            "choose another task.model"
        )
    if module.padding_mode != "zeros":
        raise ConfigError(
            f"a convolution has padding_mode={module.padding_mode!r}, and projections need "
            "'zeros': choose another task.model"
        )
    return module.padding


@dataclass(frozen=True)
class Spectrum:
    """Eigenvectors (d, r) and eigenvalues (r,) of a matrix (d, d), the largest first."""

    vectors: Tensor
    values: Tensor

    def factor(self, rank: int | None, energy: float) -> Tensor:
        """Return F (d, r), the eigenvectors times the roots of the eigenvalues.

        Without a rank r is what holds ``energy`` of the sum of the squared eigenvalues.
        """
        if rank is None:
            held = self.values.square().cumsum(0)
            enough = energy * held[-1] * (1 - 1e-12)
            rank = int((held < enough).sum()) + 1
        return (self.vectors[:, :rank] * self.values[:rank].sqrt()).float()


def eigendecomposition(matrix: Tensor) -> Spectrum:
    """Return the eigendecomposition of a symmetric, positive semidefinite matrix.

    Only its lower triangle is read.
    """
    values, vectors = torch.linalg.eigh(matrix, UPLO="L")
    return Spectrum(vectors.flip(1), values.flip(0).clamp_min(0.0))


class SecondMoment:
    """A = X^T X / n as a matrix (d, d), d the width.

    Of the symmetric sum only blocks on and below the diagonal are computed, half of the operations,
    and eigh reads nothing else.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.sum = torch.zeros(width, width, device=device, dtype=torch.float64)
        self.count = 0

    def add(self, rows: Tensor) -> None:
        """Add rows (n, d)."""
        for column in range(0, len(self.sum), _BLOCK):
            block = rows[:, column : column + _BLOCK]
            below = (rows[:, column:].T @ block).double()
            self.sum[column:, column : column + _BLOCK] += below
        self.count += len(rows)

    def mean_eigenvalue(self) -> Tensor:
        """Return the trace over d; 0 of a layer that is never called."""
        return self.sum.diagonal().mean() / max(self.count, 1)

    def spectrum(self) -> Spectrum:
        """Return the eigendecomposition of A."""
        return eigendecomposition(self.sum / max(self.count, 1))


class SketchedMoment:
    """A = X^T X / n from a sketch Y = A Omega, Omega (d, k) Gaussian and orthonormalised, k = size.

    Tropp, Yurtsever, Udell, Cevher. "Fixed-rank approximation of a positive-semidefinite matrix
    from streaming data". NeurIPS 2017. https://arxiv.org/abs/1706.05736
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
        """Add rows (n, d)."""
        self.sketch += (rows.T @ (rows @ self.test)).double()
        self.trace += rows.square().sum().double()
        self.count += len(rows)

    def mean_eigenvalue(self) -> Tensor:
        """Return the trace over d, which is exact."""
        return self.trace / (max(self.count, 1) * len(self.test))

    def spectrum(self) -> Spectrum:
        """Return the eigendecomposition of the Nystrom approximation (Algorithm 3)."""
        test = self.test.double()
        shift = _EPS * self.sketch.norm().clamp_min(torch.finfo(torch.float64).tiny)
        shifted = self.sketch + shift * test
        core = test.T @ shifted
        root = torch.linalg.cholesky((core + core.T) / 2)
        half = torch.linalg.solve_triangular(root.T, shifted, upper=True, left=False)
        vectors, values, _ = torch.linalg.svd(half, full_matrices=False)
        return Spectrum(vectors, (values.square() - shift).clamp_min(0.0) / max(self.count, 1))


class DampedProjector:
    """The projector P = I - N (d, d) of MA-Echo's released code, by its recursion over rows.

    ``step`` is so, the share of a direction that a step removes; zeta makes short rows count less.
    """

    def __init__(self, width: int, step: float, zeta: float, device: torch.device) -> None:
        self.null = torch.eye(width, device=device)
        self.step, self.zeta = step, zeta

    def add(self, rows: Tensor) -> None:
        """Take a step for each of the rows (n, d), in their order."""
        for row in rows:
            gain = self.null @ row
            self.null -= self.step * torch.outer(gain, gain) / (self.zeta + row @ gain)

    def spectrum(self) -> Spectrum:
        """Return the eigendecomposition of P."""
        projector = torch.eye(len(self.null), device=self.null.device) - self.null
        found = eigendecomposition(projector.double())
        return Spectrum(found.vectors, found.values.clamp_max(1.0))
