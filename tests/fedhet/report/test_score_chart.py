"""The picture of runs of a single round."""

from unittest.mock import patch

import pytest
from matplotlib.axes import Axes

from fedhet.report.colors import keys_of
from fedhet.report.layout import Cell, Layout, Line, Published
from fedhet.report.score_chart import scores
from fedhet.report.statistics import Figure

FIGURE = Figure("accuracy", percent=True)


@pytest.mark.slow
def test_dots_bars_and_rings_are_where_the_numbers_are(finished_run, tmp_path):
    """FedAvg's two seeds are beside the paper's number; another method was not run."""
    runs = [finished_run("fedavg", seed, (0.1, 0.4 + 0.2 * seed)) for seed in (0, 1)]
    measured = Cell(tuple(runs), published=Published(45.0))
    lines = (
        Line("FedAvg", "fedavg", (Cell(), measured)),
        Line("OT", "otfusion", (Cell(published=Published(1.0)), Cell())),
    )
    layout = Layout(("5 clients, beta 0.01", "5 clients, beta 0.1"), lines)
    keys = keys_of([(line.label, line.method) for line in lines])
    with (
        patch.object(Axes, "plot", autospec=True, side_effect=Axes.plot) as dots,
        patch.object(Axes, "vlines", autospec=True, side_effect=Axes.vlines) as bars,
    ):
        _, picture = scores(layout, keys, FIGURE, tmp_path / "t")
    drawn = [(call.args[2][0], call.kwargs.get("mfc")) for call in dots.call_args_list]
    assert drawn == [(pytest.approx(50.0), None), (45.0, "none")]
    [bar] = bars.call_args_list
    assert bar.args[2:] == pytest.approx((40.0, 60.0))
    assert "Ring beside it: the paper's number." in picture.caption
    assert "beta 0.1" in picture.svg
    assert "beta 0.01" not in picture.svg
    assert "OT" not in picture.svg  # a row without runs
