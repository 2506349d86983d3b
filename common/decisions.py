"""Right and wrong answers of one model at several sites: what a site counts, and what follows.

With two classes a site also counts its examples by class and probability of the second class, in
steps of a thousandth. Thresholds are such steps, so the sites' counts together give the answers at
every threshold exactly, and no site's examples are needed elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFUSION = "confusion"  # the action of the messages, and the record of what a site answers
ANSWERS, SCORES = "answers", "scores"  # its arrays
STEPS = 1000
MOST_CLASSES = 30  # of a confusion matrix
_THRESHOLDS = np.arange(STEPS) / STEPS

Counts = NDArray[np.int64]
SiteCounts = Mapping[str, Counts]


@dataclass(frozen=True)
class Decisions:
    """The right and wrong answers of the shared model on the sites' evaluation examples.

    With two classes an answer is "positive" (the second class) from a probability on. Each site's
    answers here are counted at the threshold that the other sites' examples choose.
    """

    classes: Sequence[str]
    counts: Sequence[Sequence[int]]  # by class and answer, all sites: the class with most votes
    threshold: float | None = None  # chosen on all sites' examples; None but for two classes
    thresholds: Sequence[float | None] = ()  # by site: chosen on the other sites' examples
    at_threshold: Sequence[Sequence[int] | None] = ()  # by site: TN, FP, FN, TP


def shapes_of(classes: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of a site's counts, by name."""
    scores = {SCORES: (2, STEPS)} if classes == 2 else {}
    return {ANSWERS: (classes, classes), **scores}


def counts_of(probabilities: NDArray[np.float64], labels: Counts) -> dict[str, Counts]:
    """Return how many examples with probabilities (n, C) have each class and answer.

    With two classes also how many have each class and step of the second one's probability.
    """
    found = {ANSWERS: probabilities.argmax(axis=1)}
    if probabilities.shape[1] == 2:
        found[SCORES] = np.searchsorted(_THRESHOLDS, probabilities[:, 1], side="right") - 1
    shapes = shapes_of(probabilities.shape[1])
    return {name: _table(labels, places, shapes[name]) for name, places in found.items()}


def _table(rows: Counts, columns: Counts, shape: tuple[int, int]) -> Counts:
    places = rows * shape[1] + columns
    return np.bincount(places, minlength=shape[0] * shape[1]).reshape(shape)


def decisions_of(
    found: Mapping[int, SiteCounts], clients: Sequence[int], classes: Sequence[str]
) -> Decisions:
    """Return what the counts of sites, by client, say; lists are in the order of ``clients``."""
    answers = _sum([one[ANSWERS] for one in found.values()])
    if len(classes) != 2:
        return Decisions(list(classes), answers.tolist())
    scores = {client: one[SCORES] for client, one in found.items()}
    total = _sum(list(scores.values()))
    steps = {client: best_step(total - scores.get(client, 0)) for client in clients}
    at_threshold = [
        None if client not in scores or step is None else _at_step(scores[client], step)
        for client, step in steps.items()
    ]
    thresholds = [_threshold(step) for step in steps.values()]
    whole = _threshold(best_step(total))
    return Decisions(list(classes), answers.tolist(), whole, thresholds, at_threshold)


def best_step(scores: Counts) -> int | None:
    """Return the step with the largest sensitivity + specificity (Youden's J) as threshold.

    An example is positive if its score is at least the threshold. Of equal ones the largest is
    chosen; None if the examples are all of one class.
    """
    negative, positive = scores[:, ::-1].cumsum(axis=1)[:, ::-1].astype(object)  # from a step on
    if not (negative[0] and positive[0]):
        return None
    gain = positive * negative[0] - negative * positive[0]  # J, times both numbers of examples
    return int(STEPS - 1 - np.argmax(gain[::-1]))


def _at_step(scores: Counts, step: int) -> list[int]:
    """Return the true negatives, false positives, false negatives and true positives."""
    return [int(part.sum()) for row in scores for part in (row[:step], row[step:])]


def _threshold(step: int | None) -> float | None:
    return None if step is None else step / STEPS


def _sum(counts: Sequence[Counts]) -> Counts:
    found: Counts = np.sum(counts, axis=0, dtype=np.int64)
    return found
