"""The confusion matrix of the sites' answers, and with two classes a threshold, after the rounds.

Asks every client for its counts (common/decisions.py) of the model that the run stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from logging import ERROR

import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.common.logger import log

from fedhet.common.decisions import (
    ANSWERS,
    CONFUSION,
    MOST_CLASSES,
    SiteCounts,
    decisions_of,
    shapes_of,
)
from fedhet.common.errors import ConfigError
from fedhet.server_app.listeners import End, Listener
from fedhet.server_app.listeners.calibration import asking, read_answers
from fedhet.server_app.parts import RunParts
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.wire.tensor_decoder import decode_tensors

Shapes = Mapping[str, tuple[int, int]]


class Confusion(Listener):
    """Writes "confusion" into summary.json: the decisions, in the order of the clients' ids.

    Args:
        parts: of the run.
        timeout: seconds to wait for the answers.

    Raises:
        ConfigError: if the task's examples do not have one of a few classes each.
    """

    def __init__(self, parts: RunParts, timeout: float) -> None:
        self._parts, self._timeout = parts, timeout
        about, count = parts.task.predictions, len(parts.task.class_names)
        if about is None or about.kind != "classification" or count > MOST_CLASSES:
            raise ConfigError(
                f"evaluation.confusion=true: task={parts.task.name} does not tell 2 to "
                f"{MOST_CLASSES} classes apart; set evaluation.confusion=false"
            )

    def on_end(self, end: End) -> None:
        """Report the decisions; if no client answers, the run still counts as completed."""
        if (ask := asking(self._parts, end, self._timeout, unseen=True)) is None:
            return
        registry = self._parts.strategy.availability.registry
        classes = self._parts.task.class_names
        held_out = registry.num_held_out
        most = {n: held_out[n] or count for n, count in registry.num_examples.items()}
        read = partial(read_counts, shapes=shapes_of(len(classes)))
        why = "no client has sent valid counts of its answers"
        try:
            found = read_answers(CONFUSION, ask(CONFUSION, ConfigRecord()), read, most)
        except TimeoutError as error:
            found, why = {}, str(error)
        if not found:
            end.about[CONFUSION] = {"error": why}
            log(ERROR, "no confusion matrix: %s", why)
            return
        end.about[CONFUSION] = asdict(decisions_of(found, sorted(most), classes))


def read_counts(sent: ArrayRecord | None, most: int, shapes: Shapes) -> SiteCounts:
    """Return a site's counts; refuse those that cannot be of at most ``most`` examples."""
    found = decode_tensors(CONFUSION, sent, shapes, {torch.int32, torch.int64})
    counts = {name: values.numpy().astype("int64") for name, values in found.items()}
    if any((one < 0).any() or (one > most).any() for one in counts.values()):
        raise RefusedReplyError(f"it has counts below 0 or above its {most} examples")
    by_class = counts[ANSWERS].sum(axis=1)
    if any((one.sum(axis=1) != by_class).any() for one in counts.values()):
        raise RefusedReplyError("its counts do not agree on how many examples a class has")
    if by_class.sum() > most:
        raise RefusedReplyError(f"it counts more than its {most} examples")
    return counts
