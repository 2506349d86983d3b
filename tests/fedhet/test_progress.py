"""What the terminal shows of a results directory that is being written."""

from __future__ import annotations

import io
import json
import os

from rich.console import Console

from common.results import ResultsFollower
from fedhet.plot import plot_run
from fedhet.progress import closing_panel, figures, round_display

ROWS = [
    {"round": 0, "accuracy": 0.1, "loss": 2.3},
    {"round": 1, "train_loss": 2.1, "seconds": 0.5, "failures": ["client 3: NaN in update"]},
    {"round": 2, "accuracy": 0.734, "loss": 0.91, "train_loss": 0.9, "seconds": 0.25},
]
SUMMARY = {"strategy": "fedavg", "task": "digits", "rounds": 2, "accuracy": 0.734}
SUMMARY |= {"best_accuracy": 0.8, "seconds": 0.75, "seconds_per_round": 0.25}
SUMMARY |= {"bytes_up": 1_500_000, "bytes_down": 2_000_000}


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, encoding="utf-8")


def shown(*, terminal):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
    with round_display(console, "fedavg on digits", 2) as show:
        for row in ROWS:
            show(row)
    return file.getvalue()


def test_rounds_are_reported_once_and_whole_and_those_measured_again(tmp_path):
    results = ResultsFollower(tmp_path)
    assert results.new_rows() == []
    write(tmp_path / "metrics.jsonl", ROWS[:1], tail='{"round": 1, "accu')
    assert [row["round"] for row in results.new_rows()] == [0]
    assert results.new_rows() == []
    path = tmp_path / "metrics.jsonl"
    write(path, ROWS)
    assert [row["round"] for row in results.new_rows()] == [1, 2]
    results = ResultsFollower(tmp_path)  # of a run that resumes from round 1
    assert results.new_rows() == []
    write(path, ROWS[:2])
    assert results.new_rows() == []
    write(path, [*ROWS, {"round": 3}])
    assert [row["round"] for row in results.new_rows()] == [2, 3]


def test_the_summary_of_the_run_before_is_not_this_ones(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(SUMMARY))
    results = ResultsFollower(tmp_path)
    assert results.summary() == {}
    path.write_text('{"half')
    assert results.summary() == {}
    path.write_text(json.dumps(SUMMARY))
    os.utime(path, ns=(1, 1))  # written again, with the same content
    assert results.summary() == SUMMARY


def test_a_log_gets_a_line_per_evaluated_round_and_a_terminal_a_bar():
    lines = shown(terminal=False).splitlines()
    assert len(lines) == 4
    assert "round   0/2  accuracy 10.00 %  loss 2.3000" in lines[1]
    assert "round   1/2  client 3: NaN in update" in lines[2]
    assert "round   2/2  accuracy 73.40 %  loss 0.9100  0.25 s/round" in lines[3]
    text = shown(terminal=True)
    assert "round 1: client 3: NaN in update" in text
    assert "round 2/2 accuracy 73.40 %  loss 0.9100  0.25 s/round" in text
    assert figures({"round": 1, "seconds": 2.0, "accuracy": None}) == "2.00 s/round"


def test_the_closing_panel_has_the_figures():
    file = io.StringIO()
    Console(file=file, width=100).print(closing_panel(SUMMARY))
    Console(file=file).print(closing_panel({"accuracy": None, "status": "completed"}))
    text = file.getvalue()
    for figure in ("73.40 %", "80.00 %", "0.8 s in rounds, 0.25 s each", "1.5 MB to the server"):
        assert figure in text


def test_the_plot_is_a_picture_even_without_points(tmp_path):
    for name, rows in (("curves", ROWS), ("nothing", [{"round": 1}])):
        path = tmp_path / f"{name}.png"
        plot_run(rows, "fedavg on digits", path)
        assert path.read_bytes().startswith(b"\x89PNG")
