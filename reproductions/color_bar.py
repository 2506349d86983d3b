"""Draws the scale of colours beside a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedhet.report.colors import AXIS, INK
from fedhet.reproductions.pictures import FONT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.colorbar import Colorbar

LABELS: Any = {"labelsize": FONT - 1, "labelcolor": INK, "color": AXIS, "length": 2, "pad": 2}


def add_color_bar(
    image: ScalarMappable, axes: Axes, ticks: Sequence[float], texts: Sequence[str]
) -> Colorbar:
    """Draw the colours of an image into axes, with these ticks."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    bar = figure.colorbar(image, cax=axes)
    bar.set_ticks(list(ticks), labels=list(texts), minor=False)
    bar.minorticks_off()
    bar.ax.tick_params(**LABELS)
    bar.outline.set_edgecolor(AXIS)
    return bar
