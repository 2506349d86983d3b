"""Eq. 6 of MA-Echo: the convex weights that make a weighted sum of vectors shortest.

    min_alpha alpha^T G alpha,   sum_i alpha_i = 1,   0 <= alpha_i <= C

for the Gram matrix G (N, N) of the vectors, solved by cvxopt's interior point method.
"""

from __future__ import annotations

from logging import WARNING

import numpy as np
import torch
from cvxopt import matrix, solvers
from flwr.common.logger import log
from torch import Tensor

_OPTIONS = {"show_progress": False, "abstol": 1e-12, "reltol": 1e-12, "feastol": 1e-12}
_MAX_GAP = 1e-6  # where rounding stops cvxopt above its tolerance; the default tolerance is 1e-7


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
