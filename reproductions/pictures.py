"""Draws a paper's own pictures with Matplotlib, two abreast."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.report.blocks import Picture
from fedhet.report.colors import AXIS, GRID, INK
from fedhet.report.names import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.5  # inches of a picture
FONT = 8.5
_LETTER = 0.6  # width of a letter, relative to its size
_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "svg.fonttype": "none",  # text stays text: a tenth of the size
    "axes.linewidth": 0.8,
    "path.simplify": True,
}


@dataclass(frozen=True)
class Spot:
    """The place of a picture: its figure, and its lower left corner in inches."""

    figure: Figure
    left: float
    bottom: float

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        """Return new axes; all in inches, from the picture's corner."""
        across, up = self.figure.get_size_inches()
        corner = ((self.left + left) / across, (self.bottom + bottom) / up)
        return self.figure.add_axes((*corner, width / across, height / up))


Draw = Callable[[Spot], None]


def picture_grid(draws: Sequence[Draw], caption: str, path: Path, height: float) -> Picture:
    """Save pictures of this height in inches as one, two abreast; ``path`` has no ending."""
    rows = -(-len(draws) // 2)
    figure = new_figure(2 * WIDTH, height * rows)
    for number, draw in enumerate(draws):
        row, column = divmod(number, 2)
        draw(Spot(figure, column * WIDTH, (rows - 1 - row) * height))
    return save(figure, path, caption)


def set_title(axes: Axes, title: str, inches: float, color: str = INK) -> None:
    """Write a title above axes in a size that fits into ``inches``."""
    fits = 72 * inches / (_LETTER * len(title))
    axes.set_title(plain(title), loc="left", fontsize=min(FONT + 1, fits), color=color, pad=5)


def shortened(name: str, most: int) -> str:
    """Return a name of at most ``most`` letters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def style_axes(axes: Axes, x_label: str, y_label: str, font: float) -> None:
    """Set the labels of axes, and the style of all pictures."""
    axes.set_xlabel(plain(x_label), fontsize=font, color=INK, labelpad=2)
    axes.set_ylabel(plain(y_label), fontsize=font, color=INK, labelpad=3)
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(AXIS)
    axes.tick_params(colors=INK, labelsize=font, color=AXIS, length=3, pad=2)


def new_figure(width: float, height: float) -> Figure:
    """Return a figure without pyplot's global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path, caption: str) -> Picture:
    """Save a figure as PNG and SVG, the same byte for byte each time; ``path`` has no ending."""
    import matplotlib

    figure.savefig(path.with_name(f"{path.name}.png"), dpi=120, metadata={"Software": None})
    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": path.name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    path.with_name(f"{path.name}.svg").write_text(buffer.getvalue(), encoding="utf-8")
    return Picture(buffer.getvalue(), caption, path.name)
