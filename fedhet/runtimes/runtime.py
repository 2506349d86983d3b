"""The runtimes by name; a runtime carries out a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from omegaconf import DictConfig

from fedhet.runtimes.local.early_server import EarlyServer
from fedhet.runtimes.local.run import LocalRun


class Runtime(Protocol):
    """Carries out one run; the context manager leaves no process of its own behind."""

    def __enter__(self) -> Self:
        """Prepare the run."""

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: Any, /) -> None:
        """End every process that was started here."""

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Start the run of a composed recipe; the apps compose it from the overrides."""

    def running(self) -> bool:
        """Return whether the run has not ended yet."""

    def failure(self) -> str:
        """Return why the run ended without writing its summary."""

    def continues(self) -> bool:
        """Return whether the run continues after the launcher was stopped."""

    def interrupted(self) -> str:
        """Say what remains of the run after the user has stopped the launcher."""


def runtime_for(recipe: DictConfig, log_path: Path, early: EarlyServer | None) -> Runtime:
    """Return the runtime that ``runtime`` names; its log goes to ``log_path``.

    ``early`` serves a local run.
    """
    name = recipe.runtime.name
    if name in ("local", "ray"):
        return LocalRun(log_path, early)
    if name == "flower":  # imported here, because TLS alone takes a tenth of a second
        from fedhet.runtimes.flower_simulation import Simulation

        return Simulation(log_path)
    from fedhet.runtimes.deployment.run import DeploymentRun

    return DeploymentRun(recipe.runtime, log_path)
