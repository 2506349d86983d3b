"""The arithmetic of MA-Echo's iterations on one layer, in the coordinates of its projections.

Client i pulls W (out, d) by (W - V_i) P_i, P_i = F_i F_i^T. With the F_i^T of all clients stacked
as ``rows`` (R, d), R = sum_i r_i,

    z_i = F_i^T (W - V_i)^T   (r_i, out),        pull_i = z_i^T F_i^T   (out, d)

An iteration moves W along a weighted sum of the pulls and updates z <- z + rows move^T: 2 out R R
operations with rows rows^T (R, R) and moves in units of the rows, 4 out R d with moves (out, d).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedhet.strategies.fusion.projected_layers import Layer

_ZERO_EIGENVALUE = 1e-12


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
