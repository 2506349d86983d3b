"""Prediction sets that the clients calibrate on held-out examples after the last round.

Two exchanges (docs/conformal.md): every client sends its log losses at the temperatures of a grid,
then a histogram of its scores at the best temperature (tasks/conformal/sketch.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO, WARNING
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.common.logger import log
from torch import nn

from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.wire.tensor_decoder import decode_tensors
from fedhet.tasks.conformal import CALIBRATE, LOG_LOSSES
from fedhet.tasks.conformal.scores import Array, coverage_and_size, probabilities_of, scores_for
from fedhet.tasks.conformal.sketch import (
    BINS,
    TEMPERATURES,
    Grid,
    shared_quantile,
    shared_temperature,
)
from fedhet.tasks.evaluation import Batched, logits_of

Answers = Mapping[int, RecordDict]
Read = TypeVar("Read")
Ask = Callable[[str, ConfigRecord], Answers]
QUERY = f"{MessageType.QUERY}.{CALIBRATE}"
_LARGEST_LOSS = 1e6  # of one example, on average


class CalibrationError(RuntimeError):
    """No client has sent a valid answer."""


@dataclass(frozen=True)
class Calibration:
    """Which prediction sets to calibrate.

    Args:
        alphas: a set must hold the right class in 1 - alpha of all cases; each in (0, 1).
        bins: of a client's histogram of scores.
        temperature_share: share of the held-out examples that fits the temperature.
    """

    alphas: Sequence[float] = ()
    bins: int = BINS
    temperature_share: float = 0.2

    def run(self, ask: Ask, classes: int, held_out: Mapping[int, int]) -> dict[str, Any]:
        """Ask the clients, and return temperature and thresholds.

        Returns:
            "temperature", the number of "examples", the "clients" that sent histograms, and
            "sets": "score", "alpha" and "threshold" of each. The threshold is None if there are
            too few examples for the alpha: every class is in the set.
        """
        asked = ConfigRecord({"temperature-share": self.temperature_share, "bins": self.bins})
        losses = _read(ask(QUERY, asked), _losses, held_out)
        if not losses:
            raise CalibrationError("no client has sent valid log losses of its held-out examples")
        temperature = shared_temperature(list(losses.values())) if self.temperature_share else 1.0
        again = ConfigRecord({**asked, "temperature": temperature})
        scores = scores_for(classes)
        grids = {score.name: Grid(score.largest(classes), self.bins) for score in scores}
        found = _read(
            ask(QUERY, again), lambda sent, most: _histograms(sent, grids, most), held_out
        )
        if not found:
            raise CalibrationError("no client has sent a valid histogram of its scores")
        sets = []
        for name, grid in grids.items():
            counts = [of_client[name] for of_client in found.values()]
            for alpha in self.alphas:
                threshold = shared_quantile(counts, grid, alpha)
                finite = threshold if math.isfinite(threshold) else None
                sets.append({"score": name, "alpha": alpha, "threshold": finite})
        examples = sum(int(of_client[scores[0].name].sum()) for of_client in found.values())
        log(INFO, "prediction sets of %s held-out examples, T = %.3g", examples, temperature)
        about = {"temperature": temperature, "examples": examples, "clients": sorted(found)}
        return {**about, "sets": sets}


def add_coverage(
    found: Mapping[str, Any], model: nn.Module, data: Batched, classes: int, seed: int
) -> None:
    """Add "coverage" and "mean_size" on the test set to each set that ``Calibration.run`` found."""
    logits, labels = logits_of(model, data)
    probabilities = probabilities_of(logits, found["temperature"])
    uniform = np.random.default_rng(seed).random(len(labels))
    scores = {score.name: score(probabilities, uniform) for score in scores_for(classes)}
    for one in found["sets"]:
        threshold = math.inf if one["threshold"] is None else one["threshold"]
        covered, size = coverage_and_size(scores[one["score"]], labels, threshold)
        one |= {"coverage": covered, "mean_size": size}


def _read(
    answers: Answers,
    read: Callable[[ArrayRecord | None, int], Read],
    held_out: Mapping[int, int],
) -> dict[int, Read]:
    """Return each client's answer, read by ``read`` with its n; refused ones are logged."""
    found = {}
    for client, content in answers.items():
        try:
            found[client] = read(content.array_records.get(CALIBRATE), held_out[client])
        except RefusedReplyError as error:
            log(WARNING, "calibration of client %s: refused: %s", client, error)
    return found


def _losses(sent: ArrayRecord | None, most: int) -> Array:
    shapes = {LOG_LOSSES: (len(TEMPERATURES),)}
    found = decode_tensors(CALIBRATE, sent, shapes, {torch.float64})[LOG_LOSSES].numpy()
    if not ((found >= 0) & (found <= _LARGEST_LOSS * most)).all():
        raise RefusedReplyError(f"its log losses are not those of {most} examples")
    return found


def _histograms(sent: ArrayRecord | None, grids: Mapping[str, Grid], most: int) -> dict[str, Any]:
    shapes = {name: (grid.bins + 1,) for name, grid in grids.items()}
    found = decode_tensors(CALIBRATE, sent, shapes, {torch.int32, torch.int64})
    counts = {name: values.numpy() for name, values in found.items()}
    if any((of_score < 0).any() or (of_score > most).any() for of_score in counts.values()):
        raise RefusedReplyError(f"its histograms have counts below 0 or above its {most} examples")
    if len({int(of_score.sum()) for of_score in counts.values()}) > 1:
        raise RefusedReplyError("its histograms are not of equally many examples")
    if any(int(of_score.sum()) > most for of_score in counts.values()):
        raise RefusedReplyError(f"its histograms are of more than its {most} held-out examples")
    return counts
