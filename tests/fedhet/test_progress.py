"""What the terminal shows of a results directory that is being written."""

import io
import json
import os
import re

import pytest
from rich.console import Console

from fedhet.common.results import ResultsFollower, write_rows
from fedhet.plot import plot_run
from fedhet.progress import closing_panel, figures, round_display

ROWS = [
    {"round": 0, "accuracy": 0.1, "loss": 2.3},
    {"round": 1, "train_loss": 2.1, "seconds": 0.5, "failures": ["client 3: NaN in update"]},
    {"round": 2, "accuracy": 0.734, "loss": 0.91, "train_loss": 0.9, "seconds": 0.25},
]
SUMMARY = {"strategy": "fedavg", "task": "digits", "rounds": 2, "accuracy": 0.734}
SUMMARY |= {"status": "completed"}
SUMMARY |= {"best_accuracy": 0.8, "seconds": 0.75, "seconds_per_round": 0.25}
SUMMARY |= {"bytes_up": 1_500_000, "bytes_down": 2_000_000}
NOTHING = {"accuracy": None, "status": "completed"}


def test_rounds_are_reported_once_and_whole_and_those_measured_again(tmp_path):
    results, path = ResultsFollower(tmp_path), tmp_path / "metrics.jsonl"
    assert results.new_rows() == []
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    path.write_text(lines[: lines.index("train_loss")])  # in round 1
    assert [row["round"] for row in results.new_rows()] == [0]
    assert results.new_rows() == []
    path.write_text(lines)
    assert [row["round"] for row in results.new_rows()] == [1, 2]
    results = ResultsFollower(tmp_path)  # of a run that resumes from round 1
    for rows, shown in ((ROWS, []), (ROWS[:2], []), ([*ROWS, {"round": 3}], [2, 3])):
        write_rows(path, rows)
        assert [row["round"] for row in results.new_rows()] == shown


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
    shown = {}
    for terminal in (False, True):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=100, color_system=None)
        with round_display(console, "fedavg on digits", 2) as display:
            display.stage("loading data")
            display.warn("no client has class 9")
            for row in ROWS:
                display.row(row)
        shown[terminal] = file.getvalue()
    lines = shown[False].splitlines()
    assert len(lines) == 6
    assert lines.pop(1) == "fedavg on digits: loading data"
    assert lines.pop(1) == "fedavg on digits: no client has class 9"
    assert "no client has class 9\n" in re.sub(r"\s+\n", "\n", shown[True])
    assert "round   0/2  accuracy 10.00 %  loss 2.3000" in lines[1]
    assert "round   1/2  client 3: NaN in update" in lines[2]
    assert "round   2/2  accuracy 73.40 %  loss 0.9100  0.25 s/round" in lines[3]
    assert "round 1: client 3: NaN in update" in shown[True]
    assert "round 2/2 accuracy 73.40 %  loss 0.9100  0.25 s/round" in shown[True]
    assert figures({"round": 1, "seconds": 2.0, "accuracy": None}) == "2.00 s/round"


@pytest.mark.slow
def test_the_end_of_a_run_has_figures_and_a_plot_even_if_nothing_was_evaluated(tmp_path):
    file = io.StringIO()
    console = Console(file=file, width=100)
    for name, rows, summary in (("curves", ROWS, SUMMARY), ("nothing", [{"round": 1}], NOTHING)):
        console.print(closing_panel(summary))
        path = tmp_path / f"{name}.png"
        plot_run(rows, "fedavg on digits", path)
        assert path.read_bytes().startswith(b"\x89PNG")
    for figure in ("73.40 %", "80.00 %", "0.8 s in rounds, 0.25 s each", "1.5 MB to the server"):
        assert figure in file.getvalue()
