"""The picture of runs of a single round."""

import pytest

from fedhet.report.colors import keys_of
from fedhet.report.layout import Cell, Layout, Line, Published, automatic_layout
from fedhet.report.score_chart import scores, single_round
from fedhet.report.statistics import Figure

FIGURE = Figure("accuracy", percent=True)


@pytest.fixture
def layout(finished_run):
    """Return FedAvg's two seeds beside the paper's number, and a method that was not run."""
    runs = [finished_run("fedavg", seed, (0.1, 0.4 + 0.2 * seed)) for seed in (0, 1)]
    measured = Cell(tuple(runs), published=Published(45.0))
    lines = (
        Line("FedAvg", "fedavg", (Cell(), measured)),
        Line("OT", "otfusion", (Cell(published=Published(1.0)), Cell())),
    )
    return Layout(("5 clients, beta 0.01", "5 clients, beta 0.1"), lines)


def test_runs_of_more_rounds_have_curves(finished_run, layout):
    assert single_round(layout)
    assert not single_round(automatic_layout([finished_run("fedavg", 0, (0.1, 0.2, 0.3))]))


def test_dots_bars_and_rings_are_where_the_numbers_are(layout, tmp_path, monkeypatch):
    from matplotlib.axes import Axes

    dots, bars = [], []
    plot, vlines = Axes.plot, Axes.vlines

    def seen(axes, x, y, marker, **style):
        dots.append((round(y[0], 6), style.get("mfc", "filled")))
        return plot(axes, x, y, marker, **style)

    def seen_bar(axes, x, low, high, **style):
        bars.append((round(low, 6), round(high, 6)))
        return vlines(axes, x, low, high, **style)

    monkeypatch.setattr(Axes, "plot", seen)
    monkeypatch.setattr(Axes, "vlines", seen_bar)
    keys = keys_of([(line.label, line.method) for line in layout.lines])
    _, picture = scores(layout, keys, FIGURE, tmp_path / "t")
    assert dots == [(50.0, "filled"), (45.0, "none")]
    assert bars == [(40.0, 60.0)]
    assert "Ring beside it: the paper's number." in picture.caption
    assert (tmp_path / "t_scores.png").exists()
    assert "beta 0.1" in picture.svg
    assert "beta 0.01" not in picture.svg
    assert "OT" not in picture.svg  # a row without runs
