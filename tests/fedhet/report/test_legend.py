"""A legend, drawn and measured."""

from dataclasses import replace

import pytest

from fedhet.report.blocks import Key
from fedhet.report.curves import new_figure
from fedhet.report.legend import legend_of

SPACED = ", ".join(f"strategy.server.lr {number}" for number in range(6))
LABELS = ["FedAvg", "MoFedSAM, rounds 50", "W" * 40, SPACED, "W" * 150]


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("width", [4.0, 12.0])
def test_a_legend_is_cut_nowhere_and_has_as_many_columns_as_there_is_room_for(label, width):
    legend = legend_of([Key(f"{label}{number}", number) for number in range(7)], width)

    def drawn(columns):
        figure = new_figure(width, 12)
        replace(legend, columns=columns).draw(figure)
        figure.canvas.draw()
        return figure.legends[0].get_window_extent(), figure

    extent, figure = drawn(legend.columns)
    assert extent.width <= figure.bbox.width
    assert extent.height / figure.dpi <= legend.height + 0.15
    wider, _ = drawn(legend.columns + 1)
    assert legend.columns == width // 2 or wider.width > figure.bbox.width
    for key, text in zip(legend.keys, legend.labels, strict=True):
        words = text.replace("\n", " " if " " in key.label else "")
        assert words == key.label
        assert text == key.label or legend.columns == 1
