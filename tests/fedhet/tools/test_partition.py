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


OWN = """
import numpy as np

def of_all(kind):
    targets = np.arange(40) % 4 if kind == "classification" else np.arange(40.0)
    return (np.zeros((40, 2), dtype="float32"), targets), None

def of_one(client_id):
    return (np.zeros((client_id + 1, 2), dtype="float32"), np.full(client_id + 1, client_id)), None
"""


@pytest.mark.slow
def test_own_data_are_shown_too_by_class_by_tenths_or_as_each_client_has_them(
    run, tmp_path, monkeypatch
):
    (tmp_path / "own_rows.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["task=own", "task.model=mlp", "clients=2", "partition=iid"]
    whole = run([*words, "task.data=own_rows:of_all", "task.classes=[a,b,c,d]"])
    assert re.search(r"client +total +a +b +c +d", whole)
    assert "examples a client: 20 to 20" in whole
    tenths = run([*words, "task.data=own_rows:of_all", "task.kind=regression"])
    assert re.search(r"tenth \d+: \d", tenths)
    own = run([*words, "task.data=own_rows:of_one", "task.num_classes=2"])
    assert "examples a client: 1 to 2" in own
    assert "own_rows:of_one gives each client its own" in own
    numbers = run([*words, "task.data=own_rows:of_one", "task.kind=regression"])
    assert re.search(r"client +total +examples *\n", numbers)
    assert "examples a client: 1 to 2" in numbers
    masks = run(["task=shapes", "clients=2", "partition=iid"])  # an image has no class
    assert re.search(r"client +total +examples *\n", masks)
    assert "classes a client" not in masks
