"""Prediction sets that the clients calibrate on held-out examples after the last round.

Sends the messages of docs/conformal.md and checks the clients' answers; the questions and the
thresholds are in tasks/conformal/calibration.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from logging import ERROR, INFO, WARNING
from typing import Any, TypeVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.common.logger import log
from torch import nn

from fedhet.server_app.listeners import End, Listener
from fedhet.server_app.parts import RunParts
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.wire.records import to_tensors
from fedhet.strategies.wire.tensor_decoder import decode_tensors
from fedhet.tasks.conformal import CALIBRATE, LOG_LOSSES
from fedhet.tasks.conformal.calibration import Calibration
from fedhet.tasks.conformal.scores import Array, coverage_and_size, probabilities_of, scores_for
from fedhet.tasks.conformal.sketch import TEMPERATURES, Counts
from fedhet.tasks.evaluation import Batched, logits_of

Answers = Mapping[int, RecordDict]
Read = TypeVar("Read")
Ask = Callable[[str, ConfigRecord], Answers]
_LARGEST_LOSS = 1e6  # of one example, on average


class CalibrationError(RuntimeError):
    """No client has sent a valid answer."""


class CalibratedSets(Listener):
    """Lets the clients calibrate once the rounds are done, and measures the sets on the test set.

    Args:
        parts: of the run.
        seed: of the run.
        timeout: seconds to wait for the answers.
    """

    def __init__(self, parts: RunParts, seed: int, timeout: float) -> None:
        self._parts, self._seed, self._timeout = parts, seed, timeout

    def on_end(self, end: End) -> None:
        """Report the sets; if the clients cannot calibrate, the run still counts as completed."""
        if (ask := asking(self._parts, end, self._timeout)) is None or end.arrays is None:
            return
        classes = self._parts.task.num_classes
        try:
            held_out = self._parts.strategy.availability.registry.num_held_out
            found = calibrate(self._parts.calibration, ask, classes, held_out)
        except (CalibrationError, TimeoutError) as error:
            log(ERROR, "no prediction sets: %s", error)
            end.about["prediction_sets"] = {"error": str(error)}
            return
        evaluation = self._parts.evaluation
        if evaluation.test_data is not None and not self._parts.has_personal:
            model = evaluation.model_of(to_tensors(end.arrays))
            add_coverage(found, model, evaluation.test_data, classes, self._seed)
        end.about["prediction_sets"] = found


def asking(parts: RunParts, end: End, timeout: float, *, unseen: bool = False) -> Ask | None:
    """Return what asks the clients about the stored model; None without one."""
    grid, arrays = end.grid, end.arrays
    if grid is None or arrays is None:
        return None

    def ask(action: str, config: ConfigRecord) -> Answers:
        config = ConfigRecord({**config, **parts.client_config})
        kind = f"{MessageType.QUERY}.{action}"
        return parts.strategy.ask_clients(grid, kind, arrays, config, timeout, unseen=unseen)

    return ask


def calibrate(
    calibration: Calibration, ask: Ask, classes: int, held_out: Mapping[int, int]
) -> dict[str, Any]:
    """Ask the clients, and return temperature and thresholds.

    Returns:
        "temperature", the number of "examples", the "clients" that sent histograms, and "sets":
        "score", "alpha" and "threshold" of each, None for an infinite one.
    """
    share, bins = calibration.temperature_share, calibration.bins
    asked = ConfigRecord({"temperature-share": share, "bins": bins})
    losses = read_answers(CALIBRATE, ask(CALIBRATE, asked), _losses, held_out)
    if not losses:
        raise CalibrationError("no client has sent valid log losses of its held-out examples")
    temperature = calibration.temperature(list(losses.values()))
    sizes = {score.name: bins + 1 for score in scores_for(classes)}
    found = read_answers(
        CALIBRATE,
        ask(CALIBRATE, ConfigRecord({**asked, "temperature": temperature})),
        lambda sent, most: _histograms(sent, sizes, most),
        held_out,
    )
    if not found:
        raise CalibrationError("no client has sent a valid histogram of its scores")
    sets = [
        {"score": name, "alpha": alpha, "threshold": q if math.isfinite(q) else None}
        for name, thresholds in calibration.thresholds(list(found.values()), classes).items()
        for alpha, q in zip(calibration.alphas, thresholds, strict=True)
    ]
    examples = sum(int(next(iter(one.values())).sum()) for one in found.values())
    log(INFO, "prediction sets of %s held-out examples, T = %.3g", examples, temperature)
    about = {"temperature": temperature, "examples": examples, "clients": sorted(found)}
    return {**about, "sets": sets}


def add_coverage(
    found: Mapping[str, Any], model: nn.Module, data: Batched, classes: int, seed: int
) -> None:
    """Add "coverage" and "mean_size" on the test set to each set that ``calibrate`` found."""
    logits, labels = logits_of(model, data)
    probabilities = probabilities_of(logits, found["temperature"])
    uniform = np.random.default_rng(seed).random(len(labels))
    scores = {score.name: score(probabilities, uniform) for score in scores_for(classes)}
    for one in found["sets"]:
        threshold = math.inf if one["threshold"] is None else one["threshold"]
        covered, size = coverage_and_size(scores[one["score"]], labels, threshold)
        one |= {"coverage": covered, "mean_size": size}


def read_answers(
    action: str,
    answers: Answers,
    read: Callable[[ArrayRecord | None, int], Read],
    most: Mapping[int, int],
) -> dict[int, Read]:
    """Return each client's answer, read by ``read`` with its n; refused ones are logged."""
    found = {}
    for client, content in answers.items():
        try:
            found[client] = read(content.array_records.get(action), most[client])
        except RefusedReplyError as error:
            log(WARNING, "%s of client %s: refused: %s", action, client, error)
    return found


def _losses(sent: ArrayRecord | None, most: int) -> Array:
    shapes = {LOG_LOSSES: (len(TEMPERATURES),)}
    found: Array = decode_tensors(CALIBRATE, sent, shapes, {torch.float64})[LOG_LOSSES].numpy()
    if not ((found >= 0) & (found <= _LARGEST_LOSS * most)).all():
        raise RefusedReplyError(f"its log losses are impossible for {most} examples")
    return found


def _histograms(sent: ArrayRecord | None, sizes: Mapping[str, int], most: int) -> dict[str, Counts]:
    shapes = {name: (size,) for name, size in sizes.items()}
    found = decode_tensors(CALIBRATE, sent, shapes, {torch.int32, torch.int64})
    counts = {name: values.numpy() for name, values in found.items()}
    if any((one < 0).any() or (one > most).any() for one in counts.values()):
        raise RefusedReplyError(f"its histograms have counts below 0 or above its {most} examples")
    if len(sums := {int(one.sum()) for one in counts.values()}) > 1:
        raise RefusedReplyError("its histograms count different numbers of examples")
    if max(sums) > most:
        raise RefusedReplyError(f"its histograms count more than its {most} held-out examples")
    return counts
