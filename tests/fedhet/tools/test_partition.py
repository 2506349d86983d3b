"""fedhet-partition: the table, the plot, and bad input."""

import re
import sys

import pytest
from PIL import Image

from fedhet.tools import partition


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def command(words):
        monkeypatch.setattr(sys, "argv", ["fedhet-partition", *words])
        partition.main()
        return capsys.readouterr().out

    return command


@pytest.mark.slow
def test_it_prints_the_table_and_saves_the_plot(run, tmp_path, monkeypatch):
    printed = run(["task=digits", "partition=pathological", "clients=4", "seed=3"])
    path = tmp_path / "results/partitions/digits-pathological-clients4-classes2-seed3.png"
    title = "digits, pathological: clients=4 classes=2 seed=3"
    lines = ("examples a client: 359 to 359", "classes a client: 2 to 2", "repeated:")
    assert all(words in printed for words in (title, *lines, str(path)))
    assert len(Image.open(path).convert("RGB").getcolors(1 << 20)) > 50
    printed = run(["task=digits", "partition=iid", "clients=101"])
    assert re.search(r"\.\.\. +1 more", printed)  # a table of a hundred
    monkeypatch.setenv("COLUMNS", "40")
    assert re.search(r"total +classes +largest", run(["task=digits", "partition=iid", "clients=2"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["partition=dirichlett"], "class_prior_dirichlet"),
        (["task=digits", "clients=1500"], "more than the 1437 training examples"),
        (["clients=0"], "SuperNodes: set clients"),
        (["partition=site"], "data-folder"),
    ],
)
def test_bad_input_ends_with_the_reason(run, refused, words, message):
    assert message in refused(run, *words)
