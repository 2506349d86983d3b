"""Pictures two abreast: on the page each its own, in the files all in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.report.blocks import Drawing, Gallery, Key
from fedhet.report.curves import INK, new_figure, save, themed_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 4.5  # inches of a picture
FONT = 8.5
_LETTER = 0.6  # widths of a letter, of its size


@dataclass(frozen=True)
class Spot:
    """Where a picture goes: its figure, and its lower left corner in inches."""

    figure: Figure
    left: float = 0.0
    bottom: float = 0.0

    def axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        """Return new axes; all in inches, from the picture's corner."""
        across, up = self.figure.get_size_inches()
        return self.figure.add_axes(
            (
                (self.left + left) / across,
                (self.bottom + bottom) / up,
                width / across,
                height / up,
            )
        )


@dataclass(frozen=True)
class Picture:
    """What draws itself into a spot, and what it is called."""

    label: str
    draw: Callable[[Spot], None]


def pair_gallery(
    pairs: Sequence[tuple[Picture, Picture]], caption: str, path: Path, height: float
) -> Gallery:
    """Draw pairs of pictures for the page, and save them as one.

    Args:
        pairs: left and right.
        caption: what is seen.
        path: of the files, without ending.
        height: of a picture, in inches.
    """
    return picture_gallery([picture for pair in pairs for picture in pair], caption, path, height)


def picture_gallery(
    pictures: Sequence[Picture],
    caption: str,
    path: Path,
    height: float,
    legend: Sequence[Key] = (),
) -> Gallery:
    """Draw pictures for the page, and save them as one, two abreast.

    Args:
        pictures: in the order of reading.
        caption: what is seen.
        path: of the files, without ending.
        height: of a picture, in inches.
        legend: what the colours mean, on the page.
    """
    rows = -(-len(pictures) // 2)
    whole = new_figure(2 * WIDTH, height * rows)
    drawings = []
    for number, picture in enumerate(pictures):
        row, column = divmod(number, 2)
        picture.draw(Spot(whole, column * WIDTH, (rows - 1 - row) * height))
        single = new_figure(WIDTH, height)
        picture.draw(Spot(single))
        drawings.append(Drawing(themed_svg(single, f"{path.name}-{number}"), picture.label))
    save(whole, path)
    return Gallery(drawings, legend, caption, [path.name])


def set_title(axes: Axes, title: str, inches: float, color: str = INK) -> None:
    """Write a title above axes, small enough for so many inches."""
    fits = 72 * inches / (_LETTER * len(title))
    axes.set_title(title, loc="left", fontsize=min(FONT + 1, fits), color=color, pad=5)


def shortened(name: str, most: int) -> str:
    """Return a name of so many letters at the most."""
    return name if len(name) <= most else f"{name[: most - 1]}…"
