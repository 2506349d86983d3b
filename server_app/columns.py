"""Fits the columns of all sites' tables together, before the model is built."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path

import numpy as np
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
from fedhet.tasks import Functions, TableTask
from fedhet.tasks.column_statistics import (
    LONGEST_CATEGORY,
    MOST_CATEGORIES,
    ColumnStatistics,
    merged,
)

FILE = "columns.json"
_LEAST = 3  # sites whose median tells what is usual
_FAR, _NORMAL = 5.0, 1.4826  # usual deviations; a normal one is so many median distances
_ALONE = 10  # categories that one site alone may bring
_LARGEST = 1e100  # of a mean; of the sum of squares its square
QUERY = f"{MessageType.QUERY}.{COLUMNS}"


def fitted_columns(recipe: DictConfig, grid: Grid, functions: Functions | None) -> str | None:
    """Return the statistics of all sites' columns; None if the task has no columns to fit.

    Raises:
        ConfigError: if the recipe hides single sites from the server, or no site answers.
        TimeoutError: if too few sites are connected.
    """
    task = task_of(recipe, functions)
    if not (isinstance(task, TableTask) and task.fits_columns):
        return None
    _check_privacy(recipe)
    options = task.config.data_options or {}
    numeric, categorical = options["numeric"], options["categorical"]
    registry = register_clients(grid, federation_of(recipe), QUERY)
    unseen = task.unseen_clients()
    timeout = float(recipe.runtime.round_timeout_seconds)
    asked = ConfigRecord({TIMEOUT: timeout, STATISTICS: True})
    messages = {
        client: Message(RecordDict({CONFIG: asked}), dst_node_id=node, message_type=QUERY)
        for client, node in sorted(registry.nodes.items())
        if client not in unseen
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
    whole = merged(list(bounded(found, numeric, categorical).values()), categorical)
    log(INFO, "columns are fitted to %s rows of %s clients", whole.rows, len(found))
    return whole.to_json()


def bounded(
    found: Mapping[int, ColumnStatistics], numeric: Sequence[str], categorical: Sequence[str]
) -> dict[int, ColumnStatistics]:
    """Return the sites' statistics without what one site alone would move too far; name the site.

    A site counts at most as many rows as all others together. In each numeric column its mean and
    its deviation count at most 5 usual deviations from the sites' medians, where the usual one is
    the median of the sites' deviations, or how far their means lie apart. A site may
    bring 10 categories that no other site has, or three times as many as the median site. Usual
    sites have the statistics of the pooled rows. Two sites stay as they are: neither is usual.
    """
    if len(found) < _LEAST:
        return dict(found)
    kept = {client: _bounded_rows(client, found) for client in found}
    for place, name in enumerate(numeric):
        kept = _bounded_numbers(kept, place, name)
    for place, name in enumerate(categorical):
        kept = _bounded_categories(kept, place, name)
    return kept


def _bounded_rows(client: int, found: Mapping[int, ColumnStatistics]) -> ColumnStatistics:
    own, others = found[client], sum(one.rows for name, one in found.items() if name != client)
    if own.rows <= others:
        return own
    text = "columns of client %s: its %s rows count as %s, as many as all other sites have"
    log(WARNING, text, client, own.rows, others)
    share = others / own.rows
    return replace(own, rows=others, counts=own.counts * share, squares=own.squares * share)


def _bounded_numbers(
    found: Mapping[int, ColumnStatistics], place: int, name: str
) -> dict[int, ColumnStatistics]:
    parts = {client: one for client, one in found.items() if one.counts[place] > 0}
    if len(parts) < _LEAST:
        return dict(found)
    means = np.array([one.means[place] for one in parts.values()])
    spreads = np.array(
        [math.sqrt(one.squares[place] / one.counts[place]) for one in parts.values()]
    )
    middle, spread = float(np.median(means)), float(np.median(spreads))
    limit = _FAR * max(spread, _NORMAL * float(np.median(abs(means - middle))))
    kept = dict(found)
    for (client, one), mean, own in zip(parts.items(), means, spreads, strict=True):
        if limit == 0 or (abs(mean - middle) <= limit and own <= limit):
            continue
        text = (
            "columns of client %s: %s has the mean %g and the deviation %g, and the sites' medians "
            "are %g and %g: it counts as if it were within %g of them. Is its unit another?"
        )
        log(WARNING, text, client, name, mean, own, middle, spread, limit)
        new_means, new_squares = one.means.copy(), one.squares.copy()
        new_means[place] = np.clip(mean, middle - limit, middle + limit)
        new_squares[place] = min(own, limit) ** 2 * one.counts[place]
        kept[client] = replace(one, means=new_means, squares=new_squares)
    return kept


def _bounded_categories(
    found: Mapping[int, ColumnStatistics], place: int, name: str
) -> dict[int, ColumnStatistics]:
    sites = Counter(text for one in found.values() for text in one.categories[place])
    alone = {
        client: {text for text in one.categories[place] if sites[text] == 1}
        for client, one in found.items()
    }
    most = max(_ALONE, int(3 * statistics.median(map(len, alone.values()))))
    kept = dict(found)
    for client, own in alone.items():
        if len(own) <= most:
            continue
        text = (
            "columns of client %s: %s has %s categories that no other site has, and %s are usual: "
            "they count as no category"
        )
        log(WARNING, text, client, name, len(own), most)
        categories = list(kept[client].categories)
        categories[place] = tuple(text for text in categories[place] if text not in own)
        kept[client] = replace(kept[client], categories=tuple(categories))
    return kept


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
