"""MA-Echo's iterations on one layer: how W and the V_i follow each other (strategies/maecho.py).

Where P_i = U_i diag(p_i) U_i^T has rank r, an iteration needs W - V_i only in the coordinates
c_i = (W - V_i) U_i (out, r): with dW the step of W,

    c_i <- (c_i + dW U_i) ((1 - s) + s p_i),     dW = - s sum_i alpha_i c_i diag(p_i) U_i^T

so nothing of size N x out x d is touched; the mean of the V_i is assembled once, at the end.

With P_i = F_i F_i^T and the F_i^T of all clients stacked as ``rows`` (R, d), R = sum_i r_i,

    z_i = F_i^T (W - V_i)^T   (r_i, out),        pull_i = z_i^T F_i^T   (out, d)

an iteration moves W along a weighted sum of the pulls and updates z <- z + rows move^T: 2 out R R
operations with rows rows^T (R, R) and moves in units of the rows, 4 out R d with moves (out, d).

alpha is uniform, or that of eq. 6, the convex weights that make a weighted sum of vectors shortest:

    min_alpha alpha^T G alpha,   sum_i alpha_i = 1,   0 <= alpha_i <= C

for the Gram matrix G (N, N) of the vectors, solved by cvxopt's interior point method.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from logging import WARNING

import numpy as np
import torch
from cvxopt import matrix, solvers
from flwr.common.logger import log
from torch import Tensor

from fedhet.strategies.fusion.projections import Layer

_OPTIONS = {"show_progress": False, "abstol": 1e-12, "reltol": 1e-12, "feastol": 1e-12}
_MAX_GAP = 1e-6  # where rounding stops cvxopt above its tolerance; the default tolerance is 1e-7
_ZERO_EIGENVALUE = 1e-12


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


def min_norm_weights(gram: Tensor, cap: float) -> Tensor:
    """Return alpha (N,), with the dtype and device of the Gram matrix (N, N); ``cap`` is C.

    The weights are uniform where all vectors are zero, where C <= 1 / N leaves nothing else, and,
    with a warning, where cvxopt finds no solution.
    """
    products = gram.detach().double().cpu().numpy()
    size, scale = len(products), products.diagonal().mean()
    alpha = np.full(size, 1.0 / size)
    if scale > 1e-30 and cap * size > 1.0:
        try:
            found = solvers.qp(
                P=matrix((products + products.T) / (2.0 * scale)),
                q=matrix(0.0, (size, 1)),
                G=matrix(np.concatenate([-np.eye(size), np.eye(size)])),
                h=matrix([0.0] * size + [cap] * size),
                A=matrix(1.0, (1, size)),
                b=matrix(1.0),
                options=_OPTIONS,
            )
        except (ArithmeticError, ValueError):
            found = {"gap": float("inf")}
        if found["gap"] < _MAX_GAP:
            alpha = np.array(found["x"]).ravel().clip(0.0, cap)
            alpha /= alpha.sum()
        else:
            log(WARNING, "MA-Echo: cvxopt did not solve eq. 6; the weights are uniform")
    return torch.as_tensor(alpha, dtype=gram.dtype, device=gram.device)


@dataclass(frozen=True)
class Inputs:
    """A layer's inputs, with those merged that no client's projection tells apart.

    MNIST's border, black in every image, is such a group of pixels. m equal columns of the rows
    become one, times sqrt(m): every product with P_i stays the same. So does it in an orthonormal
    basis of the rows.
    """

    group: Tensor | None  # the merged column of each input (d,); None: nothing is merged
    scale: Tensor  # 1 / sqrt(m) of each merged column (D,)
    basis: Tensor | None = None  # of what the rows span (D, q), columns of length 1; None: all

    @classmethod
    def of(cls, rows: Tensor) -> Inputs:
        """Find the equal columns of rows (R, d): candidates have nearly equal weighted sums."""
        width = rows.shape[1]
        sums = torch.linspace(1.0, 2.0, len(rows), dtype=rows.dtype, device=rows.device) @ rows
        ordered, order = sums.sort()
        near = (ordered.diff() <= 1e-4 * sums.abs().max()).nonzero().flatten()
        apart = (rows[:, order[near + 1]] - rows[:, order[near]]).abs().sum(0)
        new = torch.ones(width, dtype=torch.int64, device=rows.device)
        new[near[apart <= 100 * torch.finfo(rows.dtype).eps] + 1] = 0
        group = torch.empty_like(new)
        group[order] = new.cumsum(0) - 1
        counts = group.bincount()
        return cls(None if len(counts) == width else group, counts.to(rows.dtype).rsqrt())

    def fold(self, matrix: Tensor) -> Tensor:
        """Return a matrix (n, d) on the merged columns (n, D), or in the basis (n, q)."""
        if self.group is not None:
            folded = matrix.new_zeros(len(matrix), len(self.scale))
            matrix = folded.index_add_(1, self.group, matrix).mul_(self.scale)
        return matrix if self.basis is None else matrix @ self.basis

    def unfold(self, matrix: Tensor) -> Tensor:
        """Return such a matrix on the inputs (n, d)."""
        matrix = matrix if self.basis is None else matrix @ self.basis.T
        return matrix if self.group is None else (matrix * self.scale)[:, self.group]


class Span:
    """The stacked projection factors of a layer, without directions of eigenvalue 0.

    Attributes:
        rows: the F_i^T (R, D), whose columns are ``inputs``; where ``reduce`` and R < D, they are
            in a basis (R, R).
        values: the eigenvalues (R, 1).
        parts: each client's slice of the rows.
        owners: each row's client (R,).
    """

    def __init__(self, layer: Layer, *, reduce: bool) -> None:
        kept = layer.values > _ZERO_EIGENVALUE
        self.values = layer.values[kept].unsqueeze(1)
        rows = layer.bases.transpose(1, 2)[kept].mul_(self.values.sqrt())
        self.inputs = Inputs.of(rows)
        self.rows = self.inputs.fold(rows)
        if reduce and len(rows) < self.rows.shape[1]:
            basis, triangle = torch.linalg.qr(self.rows.T)
            self.inputs = replace(self.inputs, basis=basis)
            self.rows = triangle.T.contiguous()
        ranks = kept.sum(1)
        ends = ranks.cumsum(0).tolist()
        self.parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        self.owners = torch.arange(len(ranks), device=ranks.device).repeat_interleave(ranks)

    def coordinates(self, apart: Callable[[int], Tensor]) -> Tensor:
        """Return the z_i (R, out) of the matrices (out, d) that ``apart`` gives by client."""
        return torch.cat(
            [self.rows[p] @ self.inputs.fold(apart(i)).T for i, p in enumerate(self.parts)]
        )


class Steps:
    """Computes weighted sums of pulls and their effect; z (R, out) are the pulls' coordinates.

    A move has the form (R, out), in units of the rows, or (D, out): where ``on_inputs`` is not
    needed in every iteration, whichever takes fewer operations.
    """

    def __init__(self, span: Span, *, matrices: bool) -> None:
        self.span = span
        directions, width = span.rows.shape
        self.by_row = directions < 2 * width and not matrices
        self.basis = span.rows @ span.rows.T if self.by_row else span.rows

    def gram(self, z: Tensor) -> Tensor:
        """Return the inner products of the clients' pulls (N, N)."""
        if self.by_row:
            products = self.basis * (z @ z.T)
            sums = torch.stack([products[part].sum(0) for part in self.span.parts])
            return torch.stack([sums.T[part].sum(0) for part in self.span.parts])
        pulls = torch.stack([z[part].T @ self.span.rows[part] for part in self.span.parts])
        return pulls.flatten(1) @ pulls.flatten(1).T

    def move(self, z: Tensor, weights: Tensor) -> Tensor:
        """Return the move sum_i weights_i pull_i."""
        weighted = z * weights[self.span.owners, None]
        return weighted if self.by_row else (weighted.T @ self.span.rows).T

    def seen(self, move: Tensor) -> Tensor:
        """Return F_i^T move^T of all clients (R, out)."""
        return self.basis @ move

    def update(self, z: Tensor, move: Tensor) -> None:
        """Add :meth:`seen` to z, in place."""
        z.addmm_(self.basis, move)

    def on_inputs(self, move: Tensor) -> Tensor:
        """Return a move as a matrix (out, D)."""
        return move.T @ self.span.rows if self.by_row else move.T
