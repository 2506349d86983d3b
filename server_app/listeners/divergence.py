"""Ends a run whose evaluated model is no longer finite."""

from __future__ import annotations

import math
from pathlib import Path

from fedhet.common.errors import DivergedError
from fedhet.server_app.listeners import Finished, Listener


class Divergence(Listener):
    """Raises a DivergedError after a round whose loss is NaN or Inf; ``folder`` is the run's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_round(self, finished: Finished) -> None:
        """Check the loss of the evaluated model."""
        round, loss = finished.report.round, finished.report.evaluation.get("loss", 0.0)
        if math.isfinite(loss):
            return
        what = f"after round {round} the loss of the evaluated model is {loss}"
        if round == 0:
            raise DivergedError(
                f"{what}, and nothing has been trained yet: the test examples contain NaN or Inf, "
                "or the initial model or the loss returns it"
            )
        raise DivergedError(
            f"{what}; {self._folder / 'checkpoints'} has the rounds before it (smaller steps may "
            "help: local.lr, local.clip, server.lr)"
        )
