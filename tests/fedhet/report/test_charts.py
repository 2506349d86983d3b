"""Charts: what their definitions have, and that each draws."""

from pathlib import Path

import pandas as pd
import pytest

from fedhet.report.charts import Curve, Panel, common_range, gallery
from fedhet.report.colors import PALETTE, keys_of
from fedhet.report.figures import single_scores
from fedhet.report.layout import Cell, Layout, Published
from fedhet.report.statistics import Figure


def chart(count, panels=1, log=False, **axes):
    keys = keys_of([(f"line {n}", f"method {n}") for n in range(count)]).values()
    frames = [pd.DataFrame({"y": [n, n], **axes}, index=[1, 2]) for n in range(count)]
    lines = [Curve.of(key, [frame]) for key, frame in zip(keys, frames, strict=True)]
    shown = [Panel(f"W{'w' * 60} panel", "round", "y", lines, [0.5], None, log)] * panels
    return gallery(shown, "", Path("p"), {"round": "rounds", "s": "time"})


def domain(spec):
    return spec["concat"][0]["layer"][0]["encoding"]["color"]["scale"]


def test_no_picture_has_a_colour_twice_and_the_page_has_all_lines():
    found = chart(len(PALETTE) + 4)
    assert list(found.pictures) == ["p_rounds", "p_rounds_2"]
    colors = [domain(spec)["range"] for spec in found.pictures.values()]
    assert [len(own) for own in colors] == [len(PALETTE), 4]
    assert all(len(set(own)) == len(own) for own in colors)
    assert len(domain(found.shown["round"])["domain"]) == len(PALETTE) + 4
    assert list(chart(len(PALETTE)).pictures) == ["p_rounds"]


def test_the_steep_start_does_not_decide_the_range_of_y_unless_there_is_little_else():
    (key,) = keys_of([("line", "method")]).values()

    def height(*values):
        low, high = common_range([Curve.of(key, [pd.DataFrame({"y": values})])])
        return high - low

    assert height(10, 80, 82, 84) < 5
    assert 70 < height(10, 80) < 80


def test_an_axis_that_no_line_has_gets_no_picture():
    """Seconds of a long run are thinned, so no line has one at every round."""
    assert list(chart(1, s=[3, 4]).pictures) == ["p_rounds", "p_time"]
    assert list(chart(1).shown) == ["round"]


@pytest.mark.slow
def test_a_chart_and_its_pictures_are_one_definition_and_draw_the_same_each_time(tmp_path):
    """The page adds what answers a reader: parameters, and points to point at."""
    found = chart(2, panels=4, s=[3, 4])
    still, live = found.pictures["p_rounds"], found.shown["round"]
    assert [len(view["layer"]) for view in still["concat"]] == [4] * 4  # line, band, ends, a mark
    assert [len(view["layer"]) for view in live["concat"]] == [5] * 4
    names = [param["name"] for v in live["concat"] for param in v["layer"][0]["params"]]
    assert sorted(names) == ["chosen", "zoom0", "zoom1", "zoom2", "zoom3"]
    assert "params" not in str(still)
    found.save(tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {
        f"p_{kind}.{end}" for kind in ("rounds", "time") for end in ("png", "svg")
    }
    assert b"line 1" in first["p_rounds.svg"]
    found.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_dots_bars_and_rings_are_where_the_numbers_are(finished_run, tmp_path):
    """FedAvg's two seeds are beside the paper's number; another method was not run."""
    runs = [finished_run("fedavg", seed, (0.1, 0.4 + 0.2 * seed)) for seed in (0, 1)]
    columns = ("5 clients, beta 0.01", "5 clients, beta 0.1")
    cells = (
        Cell("FedAvg", columns[0], "fedavg"),
        Cell("FedAvg", columns[1], "fedavg", tuple(runs), published=(Published("45", 45.0),)),
        Cell("OT", columns[0], "otfusion", published=(Published("1", 1.0),)),
        Cell("OT", columns[1], "otfusion"),
    )
    layout = Layout(columns, cells)
    keys = keys_of(list(layout.methods.items()))
    _, found = single_scores(layout, keys, Figure("accuracy", percent=True), tmp_path / "t")
    (row,) = found.data["data"]
    assert row == ["5 clients, beta 0.1", "FedAvg", 50.0, 40.0, 60.0, 45.0]
    assert "Ring beside it: the paper's number." in found.caption
    assert "OT" not in str(found.pictures)  # a row without runs
    found.save(tmp_path)
    assert "beta 0.1" in (tmp_path / "t_scores.svg").read_text()
