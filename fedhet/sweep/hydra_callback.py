"""What Hydra calls when a sweep begins and ends (hydra.callbacks in conf/config.yaml)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from fedhet.sweep import arguments, session
from fedhet.sweep.plain import plain
from fedhet.sweep.plan import survey
from fedhet.sweep.sweep_folder import SweepRefused

_NOT_KEPT = ("hydra.mode", "hydra.sweep.dir")  # --resume knows of both


class SweepCallback(Callback):
    """Opens the sweep's session; every job's process has one of these, too, which does nothing."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Begin a sweep."""
        try:
            session.start(_session(config))
        except SweepRefused as error:  # Hydra would warn of an exception, and go on
            sys.exit(f"fedhet: {error}")

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Take note that all jobs have ended."""
        session.jobs_ended()


def _session(config: DictConfig) -> session.Session:
    nodes = {name: plain(config.hydra[name]) for name in ("sweeper", "launcher")}
    words = [str(word) for word in config.hydra.overrides.task]
    settings = [str(word) for word in config.hydra.overrides.hydra]
    objective = str(config.objective)
    return session.Session(
        folder=Path(config.hydra.sweep.dir),
        words=[*words, *(word for word in settings if arguments.key_of(word) not in _NOT_KEPT)],
        objective=objective,
        nodes=nodes,
        ahead=survey(words, objective, nodes["sweeper"]),
        resuming=arguments.resuming(),
    )
