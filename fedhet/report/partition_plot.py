"""Draws a partition: how many examples of each class each client holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedhet.report.names import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_NUMBERED_CELLS = 250
TITLE_KEYS = ("alpha", "classes", "shards_per_client", "min_size", "seed")
Counts = NDArray[np.int64]  # (N, C)


def chosen_values(
    partition: Mapping[str, Any], *, clients: int, seed: int, train_size: int | None
) -> dict[str, Any]:
    """Return the settings that identify a partition of its flavour, in the order of a title."""
    chosen: dict[str, Any] = {"clients": clients}
    chosen |= {key: partition[key] for key in TITLE_KEYS if partition.get(key) is not None}
    chosen.setdefault("seed", seed)
    if train_size is not None:
        chosen["train_size"] = train_size
    return chosen


def partition_title(task: str, flavour: str, chosen: Mapping[str, Any]) -> str:
    """Return a title such as ``digits, dirichlet: clients=10 alpha=0.1 seed=0``."""
    return f"{task}, {flavour}: " + " ".join(f"{key}={value}" for key, value in chosen.items())


def picture_size(counts: Counts) -> tuple[float, float]:
    """Return width and height in inches."""
    clients, classes = counts.shape
    return float(np.clip(0.42 * clients, 6, 15)) + 1.6, _rows_height(classes) + 2.2


def _rows_height(classes: int) -> float:
    return float(np.clip(0.36 * classes, 2.6, 9))  # inches of the lower part


def draw_partition(
    figure: Figure,
    counts: Counts,
    names: Sequence[str],
    title: str,
    *,
    most_ticks: int = 40,
    numbered: bool = True,
) -> None:
    """Draw the clients' sizes, and below them clients by classes, darker for more examples.

    The figure is empty and has a layout engine. With ``numbered``, the counts are written into the
    cells if there are few.
    """
    from matplotlib.colors import PowerNorm

    clients, classes = counts.shape
    ratios = [1.1, _rows_height(classes)]
    sizes_axes, axes = figure.subplots(2, 1, sharex=True, height_ratios=ratios)
    fits = 72 * figure.get_figwidth() / (0.6 * len(title))
    figure.suptitle(plain(title), fontsize=min(11, fits))
    sizes_axes.bar(range(clients), counts.sum(axis=1), width=0.82, color="#7a8797")
    sizes_axes.set_ylabel("examples")
    sizes_axes.spines[["top", "right"]].set_visible(False)
    sizes_axes.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    shown = np.ma.masked_equal(counts.T, 0)
    norm = PowerNorm(0.4, vmin=0, vmax=max(1, int(counts.max())))
    image = axes.imshow(shown, aspect="auto", cmap="YlGnBu", norm=norm, interpolation="nearest")
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    labelled = every_nth(classes, most_ticks)
    axes.set_yticks(labelled, [plain(names[label]) for label in labelled])
    axes.set_xticks(every_nth(clients, most_ticks if clients <= 100 else most_ticks // 2))
    _draw_grid(axes, clients, classes)
    if numbered and counts.size <= MAX_NUMBERED_CELLS:
        _draw_numbers(axes, counts)
    figure.colorbar(image, ax=axes, label="examples", pad=0.01, aspect=30, fraction=0.05)


def every_nth(count: int, most: int) -> range:
    """Return at most ``most`` of the first ``count`` numbers, at even steps, for ticks."""
    steps = (step * scale for scale in (1, 10, 100, 1000) for step in (1, 2, 5))
    return range(0, count, next(step for step in steps if count / step <= most))


def _draw_grid(axes: Any, clients: int, classes: int) -> None:
    axes.spines[:].set_color("#c4cad1")
    width, height = axes.figure.get_size_inches()
    if width / clients < 0.09 or height / classes < 0.09:  # the lines would hide the cells
        return
    axes.set_xticks(np.arange(clients + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#e3e6ea", linewidth=0.5)
    axes.tick_params(which="minor", length=0)


def _draw_numbers(axes: Any, counts: Counts) -> None:
    style = {"ha": "center", "va": "center", "fontsize": 7}
    for client, label in np.argwhere(counts):
        count = counts[client, label]
        colour = "white" if count > 0.25 * counts.max() else "#1c2733"
        axes.text(client, label, str(count), color=colour, **style)
