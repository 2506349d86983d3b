"""Which pictures a chart of lines has."""

from pathlib import Path

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


def test_an_axis_that_no_line_has_gets_no_picture():
    """Seconds of a long run are thinned, so no line has one at every round."""
    assert list(chart(1, s=[3, 4]).pictures) == ["p_rounds", "p_time"]
    assert chart(1).data["axes"] == ["round"]
