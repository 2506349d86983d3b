"""What Hydra calls when a sweep begins and ends (hydra.callbacks in conf/config.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from fedhet.commands import reported_errors
from fedhet.conf import plain_part, words_of
from fedhet.sweep import resume, session
from fedhet.sweep.plan import plan_sweep

_NOT_KEPT = ("hydra.mode", "hydra.sweep.dir")  # --resume sets both


class SweepCallback(Callback):
    """Opens the sweep's session in the launcher process; the copies in the jobs do nothing."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin a sweep."""
        with reported_errors("fedhet"):  # Hydra would only warn of an exception
            hydra, objective = config.hydra, str(config.objective)
            sweeper, launcher = (plain_part(hydra, name) for name in ("sweeper", "launcher"))
            words, settings = words_of(hydra.overrides.task), words_of(hydra.overrides.hydra)
            settings = [word for word in settings if resume.key_of(word) not in _NOT_KEPT]
            session.start(
                session.Session(
                    folder=Path(hydra.sweep.dir),
                    overrides=[*words, *settings],
                    objective=objective,
                    sweeper=sweeper,
                    launcher=launcher,
                    plan=plan_sweep(words, objective, sweeper, config),
                    resuming=resume.resuming(),
                )
            )

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Record that all jobs have ended."""
        session.jobs_ended()
