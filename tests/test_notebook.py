"""examples/compare_methods.ipynb, cell by cell, with fewer rounds."""

import json
from pathlib import Path

import matplotlib as mpl
import pytest

import fedhet
from tests.refused import refused

NOTEBOOK = Path(__file__).parents[1] / "examples" / "compare_methods.ipynb"
CELLS = [
    "".join(c["source"])
    for c in json.loads(NOTEBOOK.read_text())["cells"]
    if c["cell_type"] == "code"
]


@pytest.mark.flower
def test_the_notebook_runs_from_top_to_bottom():
    mpl.use("agg")
    names = {}
    for cell in CELLS:
        exec(
            cell.replace("ROUNDS = 20", "ROUNDS = 2"), names
        )  # no kernel: its cells are plain Python
    assert names["counts"].shape == (10, 10)
    assert names["counts"].to_numpy().sum() == 1437
    assert list(names["accuracy"].columns) == ["fedavg", "fedpvr"]
    assert list(names["accuracy"].index) == [0, 1, 2]
    assert names["accuracy"].notna().all(axis=None)


def test_a_partition_without_clients_and_an_unknown_key_are_refused():
    for words, message in ((["clients=0"], "clients"), (["roundz=3"], "rounds")):
        with refused(*message.split()):
            fedhet.partition(*words)
    with refused("rounds"):
        fedhet.run("roundz=3")
    with refused("results_dir"):
        fedhet.run("results_dir=/x")
