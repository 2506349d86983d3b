"""Metrics of a regression that torchmetrics' own sums would round away: see :class:`_Fit`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.regression import SpearmanCorrCoef
from torchmetrics.utilities import dim_zero_cat


class _Fit(Metric):
    """Squared deviations of targets (n, k), residuals and outputs, summed in float64.

    torchmetrics takes a plain sum of squares in float32. If targets are far from 0, only rounding
    remains of it; if their unit is small, torchmetrics takes it for zero. This class subtracts the
    first example's values and adds the deviations of batches by the formula of Chan, Golub and
    LeVeque (The American Statistician 37, 1983). Equal targets then deviate by exactly 0.
    """

    full_state_update = False
    count: Tensor
    first: Tensor  # (3, 1, k), the first targets, residuals and outputs
    mean: Tensor  # (3, k), less the first
    squares: Tensor  # (3, k), squared deviations from the mean
    residuals: Tensor  # (k,), their squares

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "first", "mean", "squares", "residuals"):
            self.add_state(name, torch.zeros((), dtype=torch.float64))

    def update(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch of values (B,) or (B, k)."""
        if len(labels) == 0:
            return
        targets, given = (one.double().reshape(len(labels), -1) for one in (labels, outputs))
        residuals = targets - given
        values = torch.stack([targets, residuals, given])
        if not self.count:
            self.first = values[:, :1]
        values = values - self.first
        mean, size = values.mean(dim=1), len(labels)
        squares = (values - mean[:, None]).square().sum(dim=1)
        total, apart = self.count + size, mean - self.mean
        self.squares = self.squares + squares + apart.square() * self.count * size / total
        self.mean = self.mean + apart * size / total
        self.residuals = self.residuals + residuals.square().sum(dim=0)
        self.count = total

    def _share_left(self, error: Tensor) -> Tensor:
        """Return 1 - error / squares of the targets (k,); NaN if the targets are equal."""
        squares = self.squares[0]
        return torch.where(squares > 0, 1 - error / squares, math.nan)


class R2(_Fit):
    """1 - sum of squared residuals / sum of squared deviations of the targets."""

    def compute(self) -> Tensor:
        """Return the value of each output (k,)."""
        return self._share_left(self.residuals)


class ExplainedVariance(_Fit):
    """1 - variance of the residuals / variance of the targets."""

    def compute(self) -> Tensor:
        """Return the value of each output (k,)."""
        return self._share_left(self.squares[1])


class Pearson(_Fit):
    """Covariance of targets and outputs / product of their standard deviations."""

    def compute(self) -> Tensor:
        """Return the value of each output (k,)."""
        targets, residuals, outputs = self.squares
        both = (targets * outputs).sqrt()  # residuals = sum - 2 covariance
        found = ((targets + outputs - residuals) / (2 * both)).clamp(-1, 1)
        return torch.where(both > 0, found, math.nan)


class Spearman(SpearmanCorrCoef):
    """Spearman's correlation; NaN if all targets or all outputs are equal."""

    def compute(self) -> Tensor:
        """Return the value of each output (k,)."""
        found = super().compute()
        for values in (dim_zero_cat(self.preds), dim_zero_cat(self.target)):
            same = (values == values[:1]).all(dim=0)
            found = torch.where(same, math.nan, found)
        return found
