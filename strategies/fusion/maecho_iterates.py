"""MA-Echo's iterations on one layer: how W and the V_i follow each other (strategies/maecho.py).

Where P_i = U_i diag(p_i) U_i^T has rank r, an iteration needs W - V_i only in the coordinates
c_i = (W - V_i) U_i (out, r): with dW the step of W,

    c_i <- (c_i + dW U_i) ((1 - s) + s p_i),     dW = - s sum_i alpha_i c_i diag(p_i) U_i^T

so nothing of size N x out x d is touched; the mean of the V_i is assembled once, at the end.
projection_steps.py has the products.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from fedhet.strategies.fusion.projected_layers import Layer
from fedhet.strategies.fusion.projection_steps import Span, Steps
from fedhet.strategies.fusion.quadratic_program import min_norm_weights


class Iterate(ABC):
    """W and the V_i of one layer, W = ``start`` (out, d) and V_i = W_i at first.

    ``cap`` is C of eq. 6; None: uniform weights.
    """

    remaining = 0.0  # share of the initial W - V_i that is left where no projection acts
    matrices = False  # whether every move is needed as a matrix on the inputs

    def __init__(self, layer: Layer, start: Tensor, cap: float | None) -> None:
        self.layer, self.start, self.cap = layer, start, cap
        self.span = Span(layer, reduce=self.matrices)
        # F_i^T (W - V_i)^T, for eq. 11 F_i^T (W - W_i)^T (R, out)
        self.coordinates = self.span.coordinates(lambda i: start - layer.local[i])
        self.steps = Steps(self.span, matrices=self.matrices)
        self.weights = start.new_full((len(layer.local),), 1.0 / len(layer.local))
        # how far W has moved
        self.total = self.steps.move(torch.zeros_like(self.coordinates), self.weights)

    def pulls(self) -> Tensor:
        """Return the coordinates (R, out) of the (W - V_i) P_i."""
        return self.coordinates

    @abstractmethod
    def follow(self, moved: Tensor) -> None:
        """Update the V_i after a move of W."""

    def result(self) -> Tensor:
        """Return the fused layer (out, d): W."""
        return self.start + self.unfolded(self.total)

    def iterate(self, stride: float) -> Tensor:
        """W <- W - stride sum_i alpha_i (W - V_i) P_i, then the V_i; return W's move."""
        pulls = self.pulls()
        if self.cap is not None:
            self.weights = min_norm_weights(self.steps.gram(pulls), self.cap)
        moved = self.steps.move(pulls, -stride * self.weights)
        self.steps.update(self.coordinates, moved)
        self.total += moved
        self.follow(moved)
        return moved

    def relative_length(self, moved: Tensor) -> float:
        """Return the norm of a move over that of the initial W."""
        return float(self.steps.on_inputs(moved).norm() / self.start.norm().clamp_min(1e-30))

    def unfolded(self, move: Tensor) -> Tensor:
        """Return a move on all inputs (out, d)."""
        return self.span.inputs.unfold(self.steps.on_inputs(move))


class Cumulative(Iterate):
    """V_i <- V_i + s (W - V_i) (I - kappa P_i); the result is the mean of the V_i, or W.

    Outside the span of U_i, W - V_i = fading (W - V_i at first) + common, and ``common`` is the
    same for all clients. kappa is 1 in the released loop, mu / (1 + mu) in Algorithm 1.
    """

    def __init__(
        self, layer: Layer, start: Tensor, cap: float | None, step: float, kappa: float, mean: bool
    ) -> None:
        super().__init__(layer, start, cap)
        self.left, self.mean = 1.0 - step, mean
        self.kept = self.left + step * kappa * self.span.values
        self.fading = 1.0
        self.common = torch.zeros_like(self.total)  # divided by 1 - s
        self.first = self.coordinates.clone() if mean else self.coordinates

    def follow(self, moved: Tensor) -> None:
        """W - V_i <- (1 - s) (W - V_i) + s kappa (W - V_i) P_i."""
        self.coordinates *= self.kept
        if self.mean:
            torch.add(moved, self.common, alpha=self.left, out=self.common)
        self.fading *= self.left
        self.remaining = abs(self.fading)

    def result(self) -> Tensor:
        """Return mean_i V_i = W - mean_i (W - V_i), or W."""
        if not self.mean:
            return super().result()
        # fading and common everywhere, corrected to the coordinates inside the span of U_i
        common = self.left * self.common
        inside = self.coordinates - self.fading * self.first - self.steps.seen(common)
        inside /= self.span.values * len(self.layer.local)
        apart = self.fading * (self.start - self.layer.local.mean(0)) + self.unfolded(common)
        return super().result() - apart - self.span.inputs.unfold(inside.T @ self.span.rows)


class FromLocal(Iterate):
    """V_i = W_i + (W - W_i) (I - kappa P_i), always from the trained W_i (eq. 11)."""

    def __init__(self, layer: Layer, start: Tensor, cap: float | None, kappa: float) -> None:
        super().__init__(layer, start, cap)
        self.scales = torch.ones_like(self.span.values)  # V_i = W_i at first
        self.kappa = kappa

    def pulls(self) -> Tensor:
        """Return the coordinates of (W - V_i) P_i = kappa (W - W_i) P_i^2."""
        return self.coordinates * self.scales

    def follow(self, moved: Tensor) -> None:
        """From the first step on, W - V_i = kappa (W - W_i) P_i."""
        self.scales = self.kappa * self.span.values


class Normalised(Iterate):
    """The released loop with Norm and step s, which needs the length of each row of W - V_i.

    In an orthonormal basis of what the projections span, W - V_i is a matrix (out, q). Outside,
    Norm only changes the length of each of its rows (out,), never the direction.
    """

    matrices = True
    remaining = 1.0  # increments of a fixed length do not fade

    def __init__(self, layer: Layer, start: Tensor, cap: float | None, step: float) -> None:
        super().__init__(layer, start, cap)
        self.step, inputs = step, self.span.inputs
        apart = start - layer.local
        self.inside = torch.stack([inputs.fold(one) for one in apart])  # (N, out, q)
        outside = apart - torch.stack([inputs.unfold(one) for one in self.inside])
        self.lengths: Tensor = outside.norm(dim=2)  # (N, out)
        self.directions = outside / self.lengths.clamp_min(1e-30).unsqueeze(2)

    def follow(self, moved: Tensor) -> None:
        """W - V_i <- W - V_i - s Norm((W - V_i) (I - P_i)), row by row."""
        move = self.steps.on_inputs(moved)
        for inside, lengths, part in zip(self.inside, self.lengths, self.span.parts, strict=True):
            inside += move
            free = torch.addmm(inside, self.coordinates[part].T, self.span.rows[part], alpha=-1.0)
            shares = self.step / torch.hypot(free.norm(dim=1), lengths).clamp_min(1e-12)
            inside.addcmul_(free, shares.unsqueeze(1), value=-1.0)
            lengths.mul_(1.0 - shares)
            self.coordinates[part] *= 1.0 - shares * (1.0 - self.span.values[part])

    def result(self) -> Tensor:
        """Return mean_i V_i."""
        outside = torch.einsum("nod,no->od", self.directions, self.lengths) / len(self.lengths)
        return super().result() - self.span.inputs.unfold(self.inside.mean(0)) - outside
