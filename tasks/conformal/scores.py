"""Split conformal prediction of classes: temperature, scores, quantile and coverage.

Adaptive prediction sets (APS): Romano, Sesia, Candes, NeurIPS 2020, https://arxiv.org/abs/2006.02544
Regularised ones (RAPS): Angelopoulos, Bates, Jordan, Malik, ICLR 2021, https://arxiv.org/abs/2009.14193

With the classes sorted by probability, p_(1) >= p_(2) >= ..., class y in place r and one uniform
number u for the example, the score of y is

    s(x, y, u) = p_(1) + ... + p_(r-1) + u p_(r) + penalty max(0, r - free)

penalty = 0 is APS. With q the ceil((n + 1)(1 - a))-th smallest of the scores of n calibration
examples, the set {y : s(x, y, u) <= q} of a further example holds its label with a probability of
at least 1 - a and at most 1 - a + 1 / (n + 1) for any model, if the n + 1 examples are
exchangeable. A set may be empty.

Written here because no maintained library has both scores with free parameters and few
dependencies; a test compares with MAPIE's APS. SciPy is imported lazily: it takes up to a second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

COLDEST, HOTTEST = 0.05, 20.0  # range of temperatures


@dataclass(frozen=True)
class Score:
    """APS, or RAPS.

    Args:
        name: the score's name.
        penalty: lambda, for each place beyond the free ones; 0 is APS.
        free: k_reg, the number of places without a penalty.
    """

    name: str
    penalty: float = 0.0
    free: int = 1

    def __call__(self, probabilities: Array, uniform: Array) -> Array:
        """Return the score of every class (n, C), given one uniform number per example (n,)."""
        order = np.argsort(-probabilities, axis=1, kind="stable")
        ranked = np.take_along_axis(probabilities, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked
        places = np.arange(1, probabilities.shape[1] + 1)
        scores = np.minimum(before + uniform[:, None] * ranked, 1.0)  # a sum may round to more
        scores += self.penalty * np.maximum(0, places - self.free)
        found = np.empty_like(scores)
        np.put_along_axis(found, order, scores, axis=1)
        return found

    def largest(self, classes: int) -> float:
        """Return an upper bound of the scores."""
        return 1.0 + self.penalty * max(0, classes - self.free)


APS = Score("APS")


def whole_sets(probabilities: Array, threshold: float) -> NDArray[np.bool_]:
    """Return which classes (n, C) are in the APS sets that are not randomised.

    A class is in its set if all likelier ones together have at most the threshold (u = 0). Such a
    set holds the randomised one and the likeliest class, so it covers at least as much.
    """
    return APS(probabilities, np.zeros(len(probabilities))) <= threshold


def raps(classes: int) -> Score:
    """Return RAPS with lambda .01 and k_reg 1, or 5 for 100 classes and more (ours)."""
    return Score("RAPS", penalty=0.01, free=5 if classes >= 100 else 1)


def scores_for(classes: int) -> tuple[Score, ...]:
    """Return the scores for a number of classes."""
    return APS, raps(classes)


def of_labels(scores: Array, labels: Labels) -> Array:
    """Return the scores of the labels (n,) from those of all classes (n, C)."""
    found: Array = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    return found


def rank_of_quantile(count: int, alpha: float) -> int:
    """Return ceil((n + 1)(1 - a)); above n no score is large enough."""
    return math.ceil((count + 1) * (1 - alpha) - 1e-9)  # 10 * .9 is 9, up to rounding


def quantile(scores: Array, alpha: float) -> float:
    """Return q of calibration scores (n,); infinite if there are too few for this alpha.

    At alpha 1 it is -infinity, because nothing must be covered.
    """
    rank = rank_of_quantile(len(scores), alpha)
    if rank < 1:
        return -math.inf
    return math.inf if rank > len(scores) else float(np.sort(scores)[rank - 1])


def coverage_and_size(scores: Array, labels: Labels, threshold: float) -> tuple[float, float]:
    """Return the share of labels (n,) in their sets {y: score <= q}, and the sets' mean size.

    The scores (n, C) are those of every class.
    """
    inside = scores <= threshold
    covered = np.take_along_axis(inside, labels[:, None], axis=1)
    return float(covered.mean()), float(inside.sum(axis=1).mean())


def coverage_band(
    calibration: int, evaluation: int, alpha: float, level: float = 0.95
) -> tuple[float, float]:
    """Return the band that holds the coverage of one split with probability ``level``.

    Without ties, the number of covered labels among m further examples (``evaluation``) is
    beta-binomial(m, k, n + 1 - k), k = ceil((n + 1)(1 - a)), n being ``calibration``.
    """
    from scipy.stats import betabinom

    rank = rank_of_quantile(calibration, alpha)
    if rank > calibration:
        return 1.0, 1.0
    covered = betabinom(evaluation, rank, calibration + 1 - rank)
    tail = (1 - level) / 2
    return float(covered.ppf(tail)) / evaluation, float(covered.ppf(1 - tail)) / evaluation


def probabilities_of(logits: Array, temperature: float) -> Array:
    """Return the softmax (n, C) of logits over a temperature."""
    from scipy.special import softmax

    found: Array = softmax(logits / temperature, axis=1)
    return found


def log_loss(logits: Array, labels: Labels, temperature: float) -> float:
    """Return the mean negative log-likelihood of the labels at a temperature."""
    from scipy.special import log_softmax

    return float(-of_labels(log_softmax(logits / temperature, axis=1), labels).mean())


def fit_temperature(logits: Array, labels: Labels) -> float:
    """Return the temperature with the least log loss, which is convex in its inverse."""
    from scipy.optimize import minimize_scalar

    found = minimize_scalar(
        lambda log_temperature: log_loss(logits, labels, math.exp(log_temperature)),
        bounds=(math.log(COLDEST), math.log(HOTTEST)),
        method="bounded",
    )
    return math.exp(found.x)
