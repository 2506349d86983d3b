"""The plot of a run: accuracy, loss and metrics over rounds, and who holds which classes."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.common.metrics import measured_where, shown_metrics
from fedhet.common.results import (
    BY_CLIENT,
    COMPLETED,
    DIVERGED,
    Row,
    read_counts,
    read_summary_or_empty,
)
from fedhet.report.names import method_title, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg

_INK = "#3b4252"
_ACCURACY = "#1b6ca8"
_LOSS = "#c8553d"
_METRICS = ("#1b6ca8", "#c8553d", "#00865f", "#8a4f9e", "#a97400", "#6b7280")
_STYLES = ("-", "--", ":", "-.")


def can_plot() -> bool:
    """Return whether the extra `plots` is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@cache  # a sweep's later jobs find it warm
def warm_up() -> None:
    """Import Matplotlib and load its fonts, which takes half a second, before a plot is needed."""
    if not can_plot():
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot([0, 1], label="a")
    axes.legend()
    axes.set_title("a", fontweight="bold")
    canvas.draw()  # type: ignore[no-untyped-call]


def plot_run(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw the rows of metrics.jsonl into a PNG file.

    The files beside it, as far as they are there, give the partition, what was run, which then
    makes the title, and how it has ended.
    """
    # Matplotlib is an extra and slow to import; its object interface leaves pyplot alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counted, summary = read_counts(path.parent), read_summary_or_empty(path.parent)
    title = _title(summary) or title
    values = {name: v for row in rows for name, v in row.items() if v is not None}
    where = measured_where(values)
    measured = "at the clients" if where else "on the test set"
    metrics = {name: name.removeprefix(where) for name in shown_metrics(values)}
    shares = [(round, 100 * share) for round, share in _series(rows, f"{where}accuracy")]
    panels = bool(shares) + 1 + bool(metrics) + ("counts" in counted)
    figure = Figure(figsize=(4.6 * panels, 3.9), dpi=150, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    all_panels = list(figure.subplots(1, panels, squeeze=False)[0])
    over_rounds = list(all_panels)
    if "counts" in counted:
        _partition_panel(over_rounds.pop(), **counted)
    if shares:
        label = "accuracy at the clients (%)" if where else "test accuracy (%)"
        _accuracy_panel(over_rounds[0], shares, label)
    loss = over_rounds[bool(shares)]
    losses = {f"{where}loss": measured, "train_loss": "of training"}
    _curves(loss, rows, losses, (_LOSS, _INK))
    loss.set_ylabel("loss", color=_INK)
    if metrics:
        _curves(over_rounds[-1], rows, metrics, _METRICS)
        over_rounds[-1].set_ylabel(f"metrics {measured}", color=_INK)
    last = max((int(row["round"]) for row in rows), default=0)
    for axes in over_rounds:
        _style(axes, last)
    _mark_end(over_rounds, summary.get("status", COMPLETED), last)
    fits = 72 * figure.get_figwidth() / (0.62 * max(1, len(title)))
    style: Any = {"color": _INK, "fontsize": min(12, fits), "fontweight": "bold"}
    figure.suptitle(plain(title), x=0.012, ha="left", **style)
    _place(all_panels, canvas)
    canvas.print_png(path)  # type: ignore[no-untyped-call]


def _place(panels: Sequence[Axes], canvas: FigureCanvasAgg) -> None:
    """Give each panel the width that its labels leave.

    Constrained layout measures all labels twice, and takes as long as all the drawing.
    """
    renderer, share = canvas.get_renderer(), 1 / len(panels)  # type: ignore[no-untyped-call]
    width, height = canvas.figure.get_size_inches()
    for number, axes in enumerate(panels):
        labels = axes.yaxis.get_tightbbox(renderer)
        inches = (axes.bbox.x0 - labels.x0) / canvas.figure.dpi if labels else 0.0
        left = min(inches / width + 0.1 / width, 0.6 * share)
        right = (0.65 if axes.images else 0.15) / width  # room for a bar's numbers
        bottom, top = 0.5 / height, 0.62 / height
        box = (number * share + left, bottom, share - left - right, 1 - bottom - top)
        axes.set_position(box)


def _accuracy_panel(axes: Axes, shares: Sequence[tuple[int, float]], label: str) -> None:
    """Draw the accuracy in percent by round; the title has the last and the best."""
    axes.set_ylabel(label, color=_INK)
    _line(axes, shares, _ACCURACY)
    (last_round, last), (best_round, best) = shares[-1], max(shares, key=lambda pair: pair[1])
    axes.axhline(last, color=_ACCURACY, lw=0.8, ls=":", alpha=0.7, zorder=0)
    title = f"{last:.2f} % after round {last_round}"
    if best > last:
        title += f", best {best:.2f} % after {best_round}"
    axes.set_title(title, loc="left", color=_ACCURACY, fontsize=9.5)


def _curves(axes: Axes, rows: Sequence[Row], names: dict[str, str], colors: Sequence[str]) -> None:
    """Draw columns by their labels; the legend has those that are drawn, if several are."""
    found = {label: points for name, label in names.items() if (points := _series(rows, name))}
    for number, (label, points) in enumerate(found.items()):
        style = _STYLES[number % len(_STYLES)]
        _line(axes, points, colors[number % len(colors)], ls=style, label=plain(label))
    if len(found) > 1:
        axes.legend(frameon=False, labelcolor=_INK, fontsize=9)
    elif found:
        axes.set_title(plain(next(iter(found))), loc="left", color=_INK, fontsize=9.5)


def _partition_panel(
    axes: Axes, class_names: Sequence[str], counts: Sequence[Sequence[int]], clients: int
) -> None:
    """Draw how many examples of each class each client holds, darker for more."""
    import numpy as np
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    values = np.ma.masked_equal(np.asarray(counts).T, 0)
    norm = PowerNorm(0.4, vmin=0, vmax=max(1, int(values.max() or 1)))
    image = axes.imshow(values, aspect="auto", cmap="YlGnBu", norm=norm, interpolation="nearest")
    shown = range(0, len(class_names), -(-len(class_names) // 20))
    axes.set_yticks(shown, [plain(class_names[label]) for label in shown])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=_INK, labelsize=8)
    axes.set_xlabel("client", color=_INK)
    what = "tenth of the targets" if class_names[0].startswith("tenth ") else "class"
    axes.set_ylabel(what, color=_INK)
    few = f", the first {len(counts)} of {clients} clients" if len(counts) < clients else ""
    axes.set_title(f"examples of each {what}{few}", loc="left", color=_INK, fontsize=9.5)
    axes.spines[:].set_color("#b8c0cc")
    bar = axes.figure.colorbar(image, cax=axes.inset_axes((1.03, 0.0, 0.035, 1.0)))
    bar.ax.tick_params(colors=_INK, labelsize=8)


def _title(summary: Mapping[str, Any]) -> str:
    """Return ``FedAvg on digits: dirichlet partition, 10 clients, seed 0``; empty if unknown."""

    if not {"strategy", "task", "partition", "clients", "seed"} <= set(summary):
        return ""
    partition = summary["partition"]
    division = f"data {partition}" if partition == BY_CLIENT else f"{partition} partition"
    where = f"{division}, {summary['clients']} clients, seed {summary['seed']}"
    return f"{method_title(str(summary['strategy']))} on {summary['task']}: {where}"


def _mark_end(panels: Sequence[Axes], status: str, last: int) -> None:
    """Mark the round after which a run that did not complete has ended."""
    if status == COMPLETED:
        return
    for axes in panels:
        axes.axvline(last, color=_LOSS, lw=1.2, ls="--", zorder=0)
        axes.annotate(
            f"{status} after round {last}" if status == DIVERGED else status,
            xy=(last, 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-3, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            color=_LOSS,
            fontsize=8.5,
        )


def _series(rows: Sequence[Row], key: str) -> list[tuple[int, float]]:
    points = ((int(row["round"]), row.get(key)) for row in rows)
    return [(round, float(v)) for round, v in points if v is not None and math.isfinite(v)]


def _line(axes: Axes, points: Sequence[tuple[int, float]], color: str, **style: Any) -> None:
    marker = "o" if len(points) <= 40 else ""
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=color, lw=1.8, marker=marker, ms=3, clip_on=False, **style)


def _style(axes: Axes, last: int) -> None:
    """Let the axis of rounds end, and have a tick, at the last one."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("round", color=_INK)
    axes.grid(axis="y", color="#e5e9f0", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#b8c0cc")
    axes.tick_params(colors=_INK, labelsize=9)
    if last == 0:  # the initial model alone
        axes.set_xlim(-1, 1)
        axes.set_xticks([0])
        return
    axes.set_xlim(0, max(1, last))
    ticks = MaxNLocator(nbins=6, integer=True).tick_values(0, max(1, last))
    step = ticks[1] - ticks[0]
    axes.set_xticks([*(int(tick) for tick in ticks if tick <= last - 0.6 * step), max(1, last)])
