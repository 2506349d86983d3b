"""Prediction sets: scores, what clients send of them, and the names under which they do."""

from tasks.conformal.scores import APS, Score, raps

CALIBRATE = "calibrate"  # the action of the messages, and the record of what clients answer
LOG_LOSSES = "log-losses"


def scores_for(classes: int) -> tuple[Score, ...]:
    """Return the scores that sets are made with, for so many classes."""
    return APS, raps(classes)
