"""Draws pictures two abreast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.report.blocks import Picture
from fedhet.report.colors import INK
from fedhet.report.curves import new_figure, save
from fedhet.report.names import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.5  # inches of a picture
FONT = 8.5
_LETTER = 0.6  # width of a letter, relative to its size


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
