"""A site's part in fitting the columns of all sites' tables together, before round 1."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedhet.common.errors import ConfigError
from fedhet.strategies.wire.records import (
    CATEGORIES,
    CLIENT,
    COLUMNS,
    CONFIG,
    STATISTICS,
    config_of,
    record_in,
    to_record,
)
from fedhet.tasks import AnyTask, TableTask


def columns_reply(
    task: AnyTask, client_id: int, folder: Path | None, info: Mapping[str, str], message: Message
) -> Message:
    """Register a client for the fit or, asked for "statistics", send those of its training rows.

    They are "columns", float64: "rows" (1,), "counts", "means" and "squares" (k,), and "missing"
    (m,), whether a categorical column has a missing value; and "categories", of each categorical
    column (tasks/column_statistics.py).
    """
    if not (isinstance(task, TableTask) and task.fits_columns):
        raise ConfigError(f"task={task.name} has no columns that sites fit together")
    found = task.column_statistics(client_id, folder)
    if not config_of(message).get(STATISTICS, False):
        ids: dict[str, int] = {"partition-id": client_id, "num-partitions": task.num_clients}
        card: dict[str, int | str] = {**info, **ids, "num-examples": found.rows, "num-held-out": 0}
        return Message(RecordDict({CLIENT: ConfigRecord({**card})}), reply_to=message)
    names = (task.config.data_options or {})["categorical"]
    lists = dict(zip(names, found.categories, strict=True))
    arrays = {
        "rows": np.array([found.rows]),
        "counts": found.counts,
        "means": found.means,
        "squares": found.squares,
        "missing": np.array([None in column for column in found.categories]),
    }
    tensors = {name: torch.from_numpy(a.astype(np.float64)) for name, a in arrays.items()}
    texts = {name: [one for one in column if one is not None] for name, column in lists.items()}
    content = RecordDict({COLUMNS: to_record(tensors), CATEGORIES: ConfigRecord({**texts})})
    return Message(content, reply_to=message)


def sent_columns(message: Message) -> str | None:
    """Return the statistics of all sites' columns that a message of the server's brings along."""
    config = record_in(message.content, CONFIG, ConfigRecord)
    return str(config[COLUMNS]) if config is not None and COLUMNS in config else None
