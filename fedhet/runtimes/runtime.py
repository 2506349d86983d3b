"""What can carry out a run, by the name of its runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

from omegaconf import DictConfig

from fedhet.runtimes.deployment.run import DeploymentRun
from fedhet.runtimes.flower_install import LaunchError, check_flower
from fedhet.runtimes.flower_simulation import Simulation
from fedhet.runtimes.local.run import LocalRun

RUNTIMES = ("flower", "local", "ray", "deployment")


class Engine(Protocol):
    """Carries out one run; a context manager that leaves no process of its own behind."""

    def __enter__(self) -> Engine:
        """Prepare."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every process that was started here."""

    def submit(self, recipe: DictConfig, overrides: Sequence[str]) -> None:
        """Start the run of this recipe, which the apps compose from these overrides."""

    def running(self) -> bool:
        """Return whether the run goes on."""

    def failure(self) -> str:
        """Return why the run ended without having written its summary."""

    def interrupted(self) -> str:
        """Return what is left of the run when the user has stopped the launcher."""


def engine_for(recipe: DictConfig, log_path: Path) -> Engine:
    """Return the engine that ``runtime`` names; its log goes to ``log_path``.

    Raises:
        LaunchError: for a runtime that fedhet does not start.
    """
    name = recipe.runtime.name
    if name == "flower":
        check_flower()
        return Simulation(log_path)
    if name in ("local", "ray"):
        return LocalRun(log_path)
    if name == "deployment":
        check_flower()
        return DeploymentRun(recipe.runtime, log_path)
    raise LaunchError(f"runtime={name} is none that fedhet starts; allowed: {', '.join(RUNTIMES)}")
