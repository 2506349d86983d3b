"""What a run that only its clients have evaluated shows of it."""

import io

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from fedhet.plot import plot_run
from fedhet.progress import closing_panel, figures

CLASSES = {"client_accuracy": 0.75, "client_loss": 0.5, "client_f1": 0.7, "client_f1/cat": 0.6}
TARGETS = {"client_loss": 0.5, "client_mae": 0.25, "client_r2": 0.9}


def test_metrics_of_clients_alone_are_in_a_rounds_line_and_at_the_end():
    assert figures(CLASSES) == "client accuracy 75.00 %  client loss 0.5000  client f1 0.7000"
    assert figures({**CLASSES, "loss": 1.0, "f1": 0.25}) == "loss 1.0000  f1 0.2500"
    file = io.StringIO()
    ended = {**TARGETS, "best_client_mae": 0.125, "accuracy": None, "status": "completed"}
    Console(file=file, width=100).print(closing_panel(ended))
    shown = " ".join(file.getvalue().split())
    assert "client mae 0.2500, best 0.1250" in shown


@pytest.mark.parametrize(
    ("row", "panels", "metrics"),
    [
        (CLASSES, ["accuracy at the clients (%)", "loss", "metrics at the clients"], ["f1"]),
        (TARGETS, ["loss", "metrics at the clients"], ["mae", "r2"]),
        (
            {"loss": 0.5, "mae": 0.25, "client_mae": 0.3},
            ["loss", "metrics on the test set"],
            ["mae"],
        ),
    ],
)
def test_the_plot_has_the_metrics_and_no_panel_for_an_accuracy_that_nobody_measures(
    row, panels, metrics, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(FigureCanvasAgg, "print_png", lambda canvas, _: drawn.append(canvas.figure))
    plot_run([{"round": 0}, {"round": 1, **row}, {"round": 2, **row}], "a run", tmp_path / "p.png")
    (figure,) = drawn
    assert [axes.get_ylabel() for axes in figure.axes] == panels
    last = figure.axes[-1]
    labels = [line.get_label() for line in last.lines]
    assert labels == metrics
