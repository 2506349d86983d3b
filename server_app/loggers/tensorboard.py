"""TensorBoard: event files below the results directory, `tensorboard --logdir results` shows them.

tensorboardX's SummaryWriter writes in a thread for which its ``flush`` does not wait, so its
events writer is used.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from fedhet.server_app.listeners import Start
from fedhet.server_app.loggers import Row, require_package, scalars


class TensorBoard:
    """Each metric as a scalar over rounds, and the recipe as text."""

    def __init__(self) -> None:
        self._files = require_package("tensorboardX.event_file_writer", "tensorboard")
        self._text = require_package("tensorboardX.summary", "tensorboard").text
        self._event = require_package("tensorboardX.proto.event_pb2", "tensorboard")
        self._summary = require_package("tensorboardX.proto.summary_pb2", "tensorboard")

    def start(self, run: Start) -> None:
        """Write the events afresh, with the rounds that are done."""
        folder = run.folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writer = self._files.EventsWriter(str(folder / "events"))
        # makes a running TensorBoard forget what it has read of the run
        session = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(time.time(), session_log=session)
        recipe = OmegaConf.to_yaml(OmegaConf.create(dict(run.config)))
        self._write(time.time(), summary=self._text("recipe", f"```yaml\n{recipe}```"))
        now, last = time.time(), run.rows[-1]["elapsed_seconds"] if run.rows else 0.0
        for row in run.rows:  # as if the run had ended now and had no pause
            self._write_row(row, now - last + row["elapsed_seconds"])
        self._writer.flush()

    def log(self, row: Row) -> None:
        """Write a round's scalars."""
        self._write_row(row, time.time())
        self._writer.flush()

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        self._writer.close()

    def _write_row(self, row: Row, when: float) -> None:
        value = self._summary.Summary.Value
        values = [value(tag=name, simple_value=v) for name, v in scalars(row).items()]
        self._write(when, step=row["round"], summary=self._summary.Summary(value=values))

    def _write(self, when: float, **content: Any) -> None:
        self._writer.write_event(self._event.Event(wall_time=when, **content))
