"""Which pictures a chart of lines has."""

from itertools import pairwise
from pathlib import Path

import pytest

from fedhet.report import curves
from fedhet.report.blocks import Key
from fedhet.report.colors import PALETTE, keys_of
from fedhet.report.curves import Curve, Panel, gallery


def chart(count, **axes):
    keys = keys_of([(f"line {n}", f"method {n}") for n in range(count)]).values()
    lines = [Curve(key, [1, 2], [n, n], [n, n], [n, n], 1, axes=axes) for n, key in enumerate(keys)]
    return gallery(
        [Panel("", "round", "y", lines)], "", Path("p"), {"round": "rounds", "s": "time"}
    )


def lines_of(picture) -> list[Key]:
    (panel,), legend = picture.args[:2]
    assert legend == [line.key for line in panel.curves]
    return legend


def test_no_picture_has_a_colour_twice():
    pictures = chart(len(PALETTE) + 4).pictures
    assert list(pictures) == ["p_rounds", "p_rounds_2"]
    shown = [lines_of(picture) for picture in pictures.values()]
    assert [len(keys) for keys in shown] == [len(PALETTE), 4]
    assert all(len({key.color for key in keys}) == len(keys) for keys in shown)
    assert list(chart(len(PALETTE)).pictures) == ["p_rounds"]


def test_the_steep_start_does_not_decide_the_range_of_y_unless_there_is_little_else():
    (key,) = keys_of([("line", "method")]).values()

    def height(*values):
        low, high = curves.common_range([Curve(key, range(len(values)), *[values] * 3, 1)])
        return high - low

    assert height(10, 80, 82, 84) < 5
    assert 70 < height(10, 80) < 80


def test_an_axis_that_no_line_has_gets_no_picture():
    """Seconds of a long run are thinned, so no line has one at every round."""
    assert list(chart(1, s=[3, 4]).pictures) == ["p_rounds", "p_time"]
    assert chart(1).data["axes"] == ["round"]


@pytest.mark.slow
def test_a_long_title_is_cut_nowhere_and_covers_no_other_panel(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(curves, "save", lambda figure, *_: drawn.append(figure))
    (key,) = keys_of([("FedAvg", "fedavg")]).values()
    line = Curve(key, [1, 2], [1, 2], [1, 2], [1, 2], 1)
    titles = ["", "short", "received F1 · tabular, my_project.some_models:residual_mlp", "W" * 60]
    panels = [Panel(title, "round", "y", [line]) for title in titles]
    (picture,) = gallery(
        panels, "", tmp_path / "p", {"round": "rounds"}, abreast=1
    ).pictures.values()
    picture(tmp_path / "p")
    (figure,) = drawn
    figure.canvas.draw()
    shown = [axes.get_tightbbox() for axes in figure.axes]
    assert all(0 <= box.x0 and box.x1 <= figure.bbox.width for box in shown)
    assert figure.legends[0].get_window_extent().y0 >= shown[0].y1
    assert all(above.y0 >= below.y1 for above, below in pairwise(shown))
