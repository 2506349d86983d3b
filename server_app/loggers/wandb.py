"""Weights & Biases: a run there for a run here."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from fedhet.common.files import save_text
from fedhet.common.results import COMPLETED
from fedhet.server_app.listeners import Start
from fedhet.server_app.loggers import Row, require_package, scalars


class WandB:
    """Scalars over rounds, the recipe as the run's config, and the summary.

    The key of the account is W&B's own business: ``wandb login``, or WANDB_API_KEY.

    Args:
        project: the project's name.
        entity: the user or team; None: the account's default.
        mode: "online", "offline", or None for what WANDB_MODE says.
    """

    def __init__(
        self, project: str = "fedhet", entity: str | None = None, mode: str | None = None
    ) -> None:
        self._package = require_package("wandb", "wandb")
        self._project, self._entity, self._mode = project, entity, mode

    def start(self, run: Start) -> None:
        """Open a run, or continue the folder's earlier one, and add the rounds it lacks."""
        folder = run.folder / "wandb"
        folder.mkdir(exist_ok=True)
        kept = folder / "run_id"
        if run.done is None or not kept.exists():
            save_text(kept, secrets.token_hex(4))
        self._run = self._package.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            id=kept.read_text(encoding="utf-8"),
            resume="allow",
            name=run.folder.name,
            dir=run.folder,
            config=dict(run.config),
            tags=[str(run.about["strategy"]), str(run.about["task"])],
            settings=self._package.Settings(console="off", quiet=True, reinit="create_new"),
        )
        for row in run.rows:
            self.log(row)

    def log(self, row: Row) -> None:
        """Log a round, unless W&B has it: its steps cannot be written twice."""
        if row["round"] >= self._run.step:
            self._run.log(scalars(row), step=row["round"], commit=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Add the summary, and wait until everything is written or sent."""
        self._run.summary.update({"summary": dict(summary)})
        self._run.finish(exit_code=0 if summary["status"] == COMPLETED else 1)
