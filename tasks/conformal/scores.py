"""Split conformal prediction of classes: temperature, scores, the quantile and what it promises.

Adaptive prediction sets (APS): Romano, Sesia, Candes, NeurIPS 2020, https://arxiv.org/abs/2006.02544
Regularised ones (RAPS): Angelopoulos, Bates, Jordan, Malik, ICLR 2021, https://arxiv.org/abs/2009.14193

With the classes in the order of their probabilities, p_(1) >= p_(2) >= ..., class y in place r and
one uniform number u for the example, the score of y is

    s(x, y, u) = p_(1) + ... + p_(r-1) + u p_(r) + penalty max(0, r - free)

penalty = 0 is APS. With q the ceil((n + 1)(1 - a))-th smallest of the scores of n calibration
examples, the set {y : s(x, y, u) <= q} of a further one holds its label with a probability of
1 - a at least, and 1 - a + 1 / (n + 1) at most, whatever the model: all that is needed is that the
n + 1 examples are exchangeable. A set may be empty; never to let it be would cover more.

Written here, for no maintained library has it all: MAPIE 1.6 chooses RAPS's two numbers by itself,
crepes 0.9 has neither score, TorchCP 1.2 has both and brings transformers, torch-geometric and
torchsort, puncc 0.9 wants numpy below 2. MAPIE's APS is what the tests compare with.

SciPy is imported where it is needed: it takes up to a second, and every message of a deployment
starts a process that imports this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

COLDEST, HOTTEST = 0.05, 20.0  # temperatures that are looked at


@dataclass(frozen=True)
class Score:
    """APS, or RAPS.

    Args:
        name: of the score.
        penalty: lambda, for each place beyond the free ones; 0 is APS.
        free: k_reg, how many places cost nothing.
    """

    name: str
    penalty: float = 0.0
    free: int = 1

    def __call__(self, probabilities: Array, uniform: Array) -> Array:
        """Return the score of every class, (n, C), with one uniform number (n,) an example."""
        order = np.argsort(-probabilities, axis=1, kind="stable")
        ranked = np.take_along_axis(probabilities, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked
        places = np.arange(1, probabilities.shape[1] + 1)
        scores = before + uniform[:, None] * ranked
        scores += self.penalty * np.maximum(0, places - self.free)
        found = np.empty_like(scores)
        np.put_along_axis(found, order, scores, axis=1)
        return found

    def largest(self, classes: int) -> float:
        """Return a bound of the scores with so many classes."""
        return 1.0 + self.penalty * max(0, classes - self.free)


def raps(classes: int) -> Score:
    """Return RAPS with lambda .01 and k_reg 1, or 5 for 100 classes and more (ours)."""
    return Score("RAPS", penalty=0.01, free=5 if classes >= 100 else 1)


APS = Score("APS")


def scores_for(classes: int) -> tuple[Score, ...]:
    """Return the scores that sets are made with, for so many classes."""
    return APS, raps(classes)


def of_labels(scores: Array, labels: Labels) -> Array:
    """Return the scores (n,) of the labels out of those of all classes (n, C)."""
    found: Array = np.take_along_axis(scores, labels[:, None], axis=1)[:, 0]
    return found


def rank_of_quantile(count: int, alpha: float) -> int:
    """Return ceil((n + 1)(1 - a)); above n, no score is large enough."""
    return math.ceil((count + 1) * (1 - alpha) - 1e-9)  # 10 * .9 is 9, and not a little more


def quantile(scores: Array, alpha: float) -> float:
    """Return q of calibration scores (n,); infinite where there are too few for this alpha."""
    rank = rank_of_quantile(len(scores), alpha)
    return math.inf if rank > len(scores) else float(np.sort(scores)[rank - 1])


def coverage_and_size(scores: Array, labels: Labels, threshold: float) -> tuple[float, float]:
    """Return the share of labels in the sets, and the mean size of these.

    Args:
        scores: of every class, (n, C).
        labels: (n,).
        threshold: q.
    """
    inside = scores <= threshold
    covered = np.take_along_axis(inside, labels[:, None], axis=1)
    return float(covered.mean()), float(inside.sum(axis=1).mean())


def coverage_band(
    calibration: int, evaluation: int, alpha: float, level: float = 0.95
) -> tuple[float, float]:
    """Return within which the coverage of one split lies with probability ``level``.

    The labels covered among m further examples are beta-binomial(m, k, n + 1 - k), with
    k = ceil((n + 1)(1 - a)), where scores do not tie.

    Args:
        calibration: n.
        evaluation: m.
        alpha: a.
        level: of the band.
    """
    from scipy.stats import betabinom

    rank = rank_of_quantile(calibration, alpha)
    if rank > calibration:
        return 1.0, 1.0
    covered = betabinom(evaluation, rank, calibration + 1 - rank)
    tail = (1 - level) / 2
    return float(covered.ppf(tail)) / evaluation, float(covered.ppf(1 - tail)) / evaluation


# ---- temperature ---------------------------------------------------------------------------------


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
