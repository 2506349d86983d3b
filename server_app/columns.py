"""Fits the columns of all sites' tables together, before the model is built."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from logging import INFO, WARNING
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from omegaconf import DictConfig

from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text
from fedhet.server_app.assembly import federation_of, task_of
from fedhet.strategies.base import RefusedReplyError
from fedhet.strategies.round.registration import register_clients
from fedhet.strategies.wire.messages import TIMEOUT, query
from fedhet.strategies.wire.records import CATEGORIES, COLUMNS, CONFIG, STATISTICS
from fedhet.strategies.wire.tensor_decoder import decode_tensors, printable
from fedhet.tasks import Functions, OwnTask
from fedhet.tasks.column_statistics import (
    LONGEST_CATEGORY,
    MOST_CATEGORIES,
    ColumnStatistics,
    merged,
)

FILE = "columns.json"
_STRANGE = 100.0  # standard deviations
_LARGEST = 1e100  # of a mean; of the sum of squares its square
QUERY = f"{MessageType.QUERY}.{COLUMNS}"


def fitted_columns(recipe: DictConfig, grid: Grid, functions: Functions | None) -> str | None:
    """Return the statistics of all sites' columns; None if the task has no columns to fit.

    Raises:
        ConfigError: if the recipe hides single sites from the server, or no site answers.
        TimeoutError: if too few sites are connected.
    """
    task = task_of(recipe, functions)
    if not (isinstance(task, OwnTask) and task.fits_columns):
        return None
    _check_privacy(recipe)
    options = task.config.data_options or {}
    numeric, categorical = options["numeric"], options["categorical"]
    registry = register_clients(grid, federation_of(recipe), QUERY)
    timeout = float(recipe.runtime.round_timeout_seconds)
    asked = ConfigRecord({TIMEOUT: timeout, STATISTICS: True})
    messages = {
        client: Message(RecordDict({CONFIG: asked}), dst_node_id=node, message_type=QUERY)
        for client, node in sorted(registry.nodes.items())
    }
    found: dict[int, ColumnStatistics] = {}
    for client, answer in query(grid, messages, timeout).items():
        try:
            part = decode_statistics(answer, len(numeric), categorical)
            if part.rows != registry.num_examples[client]:
                registered = registry.num_examples[client]
                raise RefusedReplyError(f"it counts {part.rows} rows and registered {registered}")
            found[client] = part
        except RefusedReplyError as refusal:
            log(WARNING, "columns of client %s: refused: %s", client, refusal)
    if not found:
        raise ConfigError("task.data_options.fit=federated: no client sent valid statistics")
    found = _within_limits(found, categorical)
    _warn_of_strange(found, numeric)
    whole = merged(list(found.values()), categorical)
    log(INFO, "columns are fitted to %s rows of %s clients", whole.rows, len(found))
    return whole.to_json()


def _within_limits(
    found: Mapping[int, ColumnStatistics], categorical: Sequence[str]
) -> dict[int, ColumnStatistics]:
    """Return the sites whose categories can be merged; name the others, which have the most.

    If they are half of the sites or more, the column is at fault: ``merged`` refuses it.
    """
    kept: dict[int, ColumnStatistics] = {}
    whole: list[set[str | None]] = [set() for _ in categorical]
    for client in sorted(found, key=lambda one: max(map(len, found[one].categories), default=0)):
        more = [one | {*own} for one, own in zip(whole, found[client].categories, strict=True)]
        if all(len(one) <= MOST_CATEGORIES for one in more):
            kept[client], whole = found[client], more
    refused = sorted(found.keys() - kept.keys())
    if 2 * len(refused) >= len(found):
        return dict(found)
    for client in refused:
        text = "columns of client %s: refused: with it a column of %s has more than %s categories"
        log(WARNING, text, client, list(categorical), MOST_CATEGORIES)
    return dict(sorted(kept.items()))


def _warn_of_strange(found: Mapping[int, ColumnStatistics], numeric: Sequence[str]) -> None:
    """Warn of a site whose column is far from the others', as in another unit."""
    for place, name in enumerate(numeric):
        parts = {client: one for client, one in found.items() if one.counts[place] > 0}
        if len(parts) < 3:
            continue
        means = {client: float(one.means[place]) for client, one in parts.items()}
        spreads = {
            client: math.sqrt(one.squares[place] / one.counts[place])
            for client, one in parts.items()
        }
        mean, spread = statistics.median(means.values()), statistics.median(spreads.values())
        for client in parts:
            if max(abs(means[client] - mean), spreads[client]) > _STRANGE * spread > 0:
                text = (
                    "columns of client %s: %s has the mean %g and the deviation %g, and the sites' "
                    "medians are %g and %g: all sites' values are scaled by it"
                )
                log(WARNING, text, client, name, means[client], spreads[client], mean, spread)


def store_columns(folder: Path, columns: str) -> None:
    """Write the statistics into a results directory, for a run that goes on with it."""
    save_text(folder / FILE, columns + "\n")


def stored_columns(folder: Path) -> str | None:
    """Return the statistics that a run has been begun with, if it has some."""
    path = folder / FILE
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def decode_statistics(
    content: RecordDict, numeric: int, categorical: Sequence[str]
) -> ColumnStatistics:
    """Return the statistics that a site has sent.

    Args:
        content: of its answer (client_app/columns.py).
        numeric: how many numeric columns there are.
        categorical: the names of the categorical ones.

    Raises:
        RefusedReplyError: says why.
    """
    if unknown := sorted(printable(name) for name in content.keys() - {COLUMNS, CATEGORIES}):
        raise RefusedReplyError(f"it has the unknown records {unknown[:5]}")
    shapes = {"rows": (1,), "missing": (len(categorical),)}
    shapes |= dict.fromkeys(("counts", "means", "squares"), (numeric,))
    record = content.array_records.get(COLUMNS)
    sent = decode_tensors(COLUMNS, record, shapes, {torch.float64}, largest=_LARGEST**2)
    values = {name: value.numpy() for name, value in sent.items()}
    rows, counts, missing = float(values["rows"][0]), values["counts"], values["missing"]
    if not (rows.is_integer() and 1 <= rows <= 1 << 48):
        raise RefusedReplyError(f"its rows are {rows:g}: they must be a whole number from 1")
    if ((counts != counts.round()) | (counts < 0) | (counts > rows)).any():
        raise RefusedReplyError(f"its counts must be whole numbers from 0 to {rows:g}")
    if (abs(values["means"]) > _LARGEST).any() or (values["squares"] < 0).any():
        raise RefusedReplyError(
            f"its means must be within {_LARGEST:g}, and its squares at least 0"
        )
    if not set(missing.tolist()) <= {0.0, 1.0}:
        raise RefusedReplyError("whether values are missing must be 0 or 1")
    texts = content.config_records.get(CATEGORIES, ConfigRecord())
    if texts.keys() != set(categorical):
        raise RefusedReplyError("its categories belong to other columns than the recipe's")
    categories = tuple(
        _categories(name, texts[name], has_missing=bool(flag))
        for name, flag in zip(categorical, missing, strict=True)
    )
    return ColumnStatistics(int(rows), counts, values["means"], values["squares"], categories)


def _categories(name: str, found: object, *, has_missing: bool) -> tuple[str | None, ...]:
    start = f"its categories of {printable(name)}"
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise RefusedReplyError(f"{start} must be a list of text")
    if len(found) > MOST_CATEGORIES or len(set(found)) < len(found):
        raise RefusedReplyError(f"{start} must be different ones, at most {MOST_CATEGORIES}")
    if max(map(len, found), default=0) > LONGEST_CATEGORY:
        raise RefusedReplyError(f"{start} must have at most {LONGEST_CATEGORY} characters")
    return (*sorted(found), *((None,) if has_missing else ()))


def _check_privacy(recipe: DictConfig) -> None:
    """Refuse to fit by single sites' statistics if the recipe hides single sites."""
    hides = [
        name
        for name in ("secure_aggregation", "differential_privacy")
        if recipe.strategy.get(name) is not None
    ]
    if hides:
        raise ConfigError(
            f"task.data_options.fit=federated: every site sends statistics of its rows, which "
            f"strategy/{hides[0]} does not hide: set task.data_options.fit=public"
        )
