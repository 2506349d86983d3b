"""The plot of a run: accuracy, loss and metrics over rounds."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.common.metrics import shown_metrics
from fedhet.common.results import Row
from fedhet.progress import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#3b4252"
_ACCURACY = "#1b6ca8"
_LOSS = "#c8553d"


def can_plot() -> bool:
    """Return whether the extra `plots` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_run(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw accuracy, loss and metrics from the rows of metrics.jsonl into a PNG file."""
    # Matplotlib is an extra and slow to import; its object interface leaves pyplot alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    metrics = list(dict.fromkeys(name for row in rows for name in shown_metrics(row)))
    panels = 3 if metrics else 2
    size = (4.75 * panels, 3.8)
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    accuracy, loss, *others = figure.subplots(1, panels)
    shares = _series(rows, "accuracy")
    _curve(accuracy, [(r, 100 * share) for r, share in shares], "test accuracy (%)", _ACCURACY)
    _curve(loss, _series(rows, "loss"), "test loss", _LOSS)
    if train := _series(rows, "train_loss"):
        loss.plot(
            *zip(*train, strict=True), color=_LOSS, alpha=0.45, lw=1.2, ls="--", label="train"
        )
        loss.lines[0].set_label("test")
        loss.set_ylabel("loss")
        loss.legend(frameon=False, labelcolor=_INK, fontsize=9)
    if others:
        _metric_curves(others[0], rows, metrics)
    for axes in (accuracy, loss, *others):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if shares:
        last_round, last = shares[-1]
        accuracy.axhline(100 * last, color=_ACCURACY, lw=0.8, ls=":", alpha=0.7, zorder=0)
        accuracy.set_title(
            f"{percent(last)} after round {last_round}", loc="left", color=_ACCURACY, fontsize=10
        )
    figure.suptitle(title, x=0.012, ha="left", color=_INK, fontsize=12, fontweight="bold")
    figure.savefig(path)


def _metric_curves(axes: Axes, rows: Sequence[Row], names: Sequence[str]) -> None:
    """Draw the metrics of evaluation.metrics into one panel."""
    for number, name in enumerate(names):
        _curve(axes, _series(rows, name), "metrics on the test set", f"C{number % 10}")
        axes.lines[-1].set_label(name)
    axes.legend(frameon=False, labelcolor=_INK, fontsize=9)


def _series(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    return [(int(row["round"]), float(row[key])) for row in rows if row.get(key) is not None]


def _curve(axes: Axes, points: Sequence[tuple[int, float]], label: str, color: str) -> None:
    axes.set_xlabel("round", color=_INK)
    axes.set_ylabel(label, color=_INK)
    axes.grid(axis="y", color="#e5e9f0", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c0cc")
    axes.tick_params(colors=_INK, labelsize=9)
    if points:
        x, y = zip(*points, strict=True)
        marker = "o" if len(points) <= 40 else ""
        axes.plot(x, y, color=color, lw=1.8, marker=marker, ms=3.5, clip_on=False)
        axes.set_xlim(left=min(0, points[0][0]))
