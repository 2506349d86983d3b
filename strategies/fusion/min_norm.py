"""Eq. 6 of MA-Echo: the convex weights that make a sum of vectors shortest.

    min_alpha alpha^T G alpha,   sum_i alpha_i = 1,   0 <= alpha_i <= C

for the Gram matrix G (N, N) of the vectors. cvxopt's interior point method solves it. From one
iteration of MA-Echo to the next G changes little, and with it which weights lie at 0 and at C. So
an active set method goes on from the last weights: a small linear system for each weight that comes
to a bound or leaves one, mostly a single one in all. It ends at the exact solution, where cvxopt
has seven digits; where it does not end, cvxopt is asked again. (60 iterations of three layers and
50 clients: 3 calls of cvxopt in place of 180, and a tenth of the time.)
"""

from __future__ import annotations

from logging import WARNING

import numpy as np
import torch
from flwr.common.logger import log
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

_AT_BOUND = 1e-6  # what cvxopt leaves between a weight and the bound that it lies at


class Shortest:
    """Solves eq. 6 again and again, for Gram matrices that change little.

    Args:
        cap: C; below 1 / N there are no such weights, and 1 / N is taken.
    """

    def __init__(self, cap: float) -> None:
        self.cap = cap
        self.last: Array | None = None

    def __call__(self, gram: Tensor) -> Tensor:
        """Return alpha (N,), of the Gram matrix's type and where it is.

        Uniform where all vectors are zero, and, with a warning, where the solvers fail.

        Args:
            gram: inner products of the vectors that are summed (N, N).
        """
        matrix = gram.detach().double().cpu().numpy()
        size, scale = len(matrix), matrix.diagonal().mean()
        alpha: Array | None = np.full(size, 1.0 / size)
        if scale > 1e-30 and self.cap * size > 1.0:
            alpha = self._solve((matrix + matrix.T) / (2.0 * scale))
        if alpha is None:
            log(WARNING, "MA-Echo: eq. 6 was not solved; uniform weights are taken")
            alpha = np.full(size, 1.0 / size)
        return torch.as_tensor(alpha, dtype=gram.dtype, device=gram.device)

    def _solve(self, gram: Array) -> Array | None:
        found = None if self.last is None else from_near(gram, self.cap, self.last)
        if found is None:
            inside = by_interior_point(gram, self.cap)
            found = None if inside is None else from_near(gram, self.cap, inside)
            found = inside if found is None else found
        self.last = found
        return found


def shortest(gram: Tensor, cap: float) -> Tensor:
    """Return the weights of one Gram matrix: see :class:`Shortest`."""
    return Shortest(cap)(gram)


def by_interior_point(gram: Array, cap: float) -> Array | None:
    """Return cvxopt's solution, or None where it finds none."""
    from cvxopt import matrix, solvers

    size = len(gram)
    inequality = matrix(np.concatenate([-np.eye(size), np.eye(size)]))
    bounds = matrix([0.0] * size + [cap] * size)
    try:
        found = solvers.qp(
            matrix(gram),
            matrix(0.0, (size, 1)),
            inequality,
            bounds,
            matrix(1.0, (1, size)),
            matrix(1.0),
            options={"show_progress": False},
        )
    except (ArithmeticError, ValueError):
        return None
    if found["status"] != "optimal":
        return None
    alpha: Array = np.clip(np.array(found["x"]).ravel(), 0.0, cap)
    alpha /= alpha.sum()
    return alpha


def from_near(gram: Array, cap: float, near: Array) -> Array | None:
    """Return the solution that a primal active set method reaches from ``near``, if it does.

    Free weights go to the best point of their face, or as far as the first bound; there, the weight
    whose bound holds it back most is freed, until no bound does.

    Args:
        gram: G, its diagonal around 1.
        cap: C.
        near: weights near the solution.
    """
    alpha = np.where(near < _AT_BOUND, 0.0, np.where(near > cap - _AT_BOUND, cap, near))
    free = (alpha > 0.0) & (alpha < cap)
    rounding = 1e-12 * gram.diagonal().max()
    for _ in range(3 * len(gram) + 10):
        try:
            move = _best_of_face(gram, alpha, free) - alpha
        except np.linalg.LinAlgError:
            return None
        room = np.where(move > 0, cap - alpha, alpha)
        share = np.divide(room, np.abs(move), out=np.full(len(alpha), np.inf), where=move != 0)
        first = int(share.argmin())
        if share[first] < 1.0:
            alpha = alpha + share[first] * move
            alpha[first] = 0.0 if move[first] < 0 else cap
            free[first] = False
            continue
        alpha = alpha + move
        held = _held_back(gram @ alpha, alpha, free, rounding)
        if not held:
            return alpha if abs(alpha.sum() - 1.0) < 1e-9 else None
        free[held] = True
    return None


def _best_of_face(gram: Array, alpha: Array, free: NDArray[np.bool_]) -> Array:
    """Return the weights that are best while those that are not free stay as they are."""
    count = int(free.sum())
    if not count:
        return alpha
    system = np.ones((count + 1, count + 1))
    system[:count, :count] = gram[np.ix_(free, free)] + 1e-12 * np.eye(count)  # equal vectors
    system[count, count] = 0.0
    fixed = np.where(free, 0.0, alpha)
    aim = np.append(-(gram[free] @ fixed), 1.0 - fixed.sum())
    best = alpha.copy()
    best[free] = np.linalg.solve(system, aim)[:count]
    return best


def _held_back(
    gradient: Array, alpha: Array, free: NDArray[np.bool_], rounding: float
) -> list[int]:
    """Return the weight whose bound keeps the sum from getting shorter most, if one does.

    Where no weight is free it takes two: one that grows and one that gives way.
    """
    least = np.where(~free & (alpha <= 0.0), gradient, np.inf)
    most = np.where(~free & (alpha > 0.0), gradient, -np.inf)
    grows, gives = int(least.argmin()), int(most.argmax())
    if not free.any():
        return [grows, gives] if most[gives] - least[grows] > rounding else []
    level = gradient[free].mean()
    gain_low, gain_high = level - least[grows], most[gives] - level
    if max(gain_low, gain_high) <= rounding:
        return []
    return [grows if gain_low >= gain_high else gives]
