"""The legend above a picture: labels in lines and entries in columns that fit its width."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedhet.report.blocks import Key
from fedhet.report.colors import INK, PALETTE, style_of
from fedhet.report.names import plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FONT, _LINE = 9.5, 2.6  # points; the line of an entry, in letters' heights
_BESIDE = (_LINE + 0.8 + 2.0) * FONT  # points beside a label: Matplotlib's .8 and 2 between them


@dataclass(frozen=True)
class Legend:
    """What is drawn of a legend.

    Attributes:
        keys: of its entries.
        labels: of the keys, broken into lines.
        columns: entries in a row.
    """

    keys: Sequence[Key]
    labels: Sequence[str]
    columns: int

    @property
    def height(self) -> float:
        """In inches."""
        lines = [label.count("\n") + 1 for label in self.labels]
        return 0.2 * max(sum(lines[n :: self.columns]) for n in range(self.columns))

    def draw(self, figure: Figure) -> None:
        """Draw it above everything."""
        from matplotlib.lines import Line2D

        handles = [
            Line2D([], [], color=PALETTE[key.color].light, lw=2.2, ls=style_of(key))
            for key in self.keys
        ]
        style: Any = {
            **{"frameon": False, "fontsize": FONT, "labelcolor": INK},
            **{"borderaxespad": 0.2, "handlelength": _LINE},
        }
        figure.legend(
            handles, list(map(plain, self.labels)), loc="upper left", ncols=self.columns, **style
        )


def legend_of(keys: Sequence[Key], width: float) -> Legend:
    """Return the legend of a picture that is ``width`` inches wide; a column takes 2 or more."""
    room = 72 * width - _BESIDE
    labels = [in_lines(key.label, room) for key in keys]
    entry = _BESIDE + max((_width(label) for label in labels), default=0.0)
    columns = int(min(width / 2, (72 * width + 2.0 * FONT) / entry, len(keys)))
    return Legend(keys, labels, max(1, columns))


def in_lines(label: str, room: float, font: float = FONT) -> str:
    """Return a label in lines of at most ``room`` points, broken between words if that will do."""
    room *= FONT / font
    found, letters = label, len(label)
    while letters > 1 and (width := _width(found)) > room:
        letters = min(letters - 1, int(letters * room / width))
        found = "\n".join(textwrap.wrap(label, max(1, letters)))
    return found


def _width(label: str) -> float:
    """Return the width of a label's longest line in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(family="DejaVu Sans")  # that of all pictures
    lines = label.split("\n")
    return max(TextPath((0, 0), one, FONT, prop=font).get_extents().width for one in lines)
