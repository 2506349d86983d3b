"""fedhet-conformal on finished runs."""

import json

import numpy as np
import pytest

from fedhet.common.results import read_summary, write_summary
from fedhet.report.blocks import Table
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import Run
from fedhet.tools.conformal import page as module
from fedhet.tools.conformal.command import main
from fedhet.tools.conformal.measure import MeasuredSets, Options, RunSets
from fedhet.tools.conformal.page import page, size_covering
from tests.recipes import TINY, run_recipe

MEASURED = MeasuredSets(
    levels=[0.1, 0.2, 0.3],
    coverage=[[0.9, 0.8, 0.7], [0.92, 0.82, 0.72]],
    size=[[3.0, 2.0, 1.0], [3.2, 2.2, 1.2]],
    temperature=1.25,
    calibration=400,
    evaluation=500,
)


def test_the_size_that_covers_as_much_is_between_two_levels():
    # means .71, .81, .91 at sizes 1.1, 2.1, 3.1
    assert size_covering(0.81, MEASURED) == pytest.approx(2.1)
    assert size_covering(0.86, MEASURED) == pytest.approx(2.6)
    assert size_covering(0.5, MEASURED) is None
    assert size_covering(0.95, MEASURED) is None


def test_tables_have_the_mean_and_spread_over_the_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_draw", lambda: False)
    runs = [Run(name, 0, name, 0, "completed") for name in ("fedavg", "fedpvr")]
    both = {"APS": MEASURED, "RAPS": MEASURED}
    found = {id(one): RunSets(0.72, both, both, both) for one in runs}
    options = Options(splits=2, federated=True)
    blocks = page(automatic_layout(runs), found, options, 0.81, tmp_path / "conformal")
    main_table, federated = [block for block in blocks if isinstance(block, Table)]
    texts = [entry.text for entry in main_table.rows[0]]
    assert texts == ["FedAvg", "72.0", "1.25", *["91.0 ± 1.4", "3.10 ± 0.14"] * 2, "2.10"]
    assert "400 scores, 500 examples" in main_table.caption
    assert federated.rows[1][1].text == "400"
    assert "4,972 bytes" in federated.caption  # 121 doubles and 1001 counts of four bytes


@pytest.mark.slow
def test_it_writes_table_plot_and_data_of_finished_runs(tmp_path, capsys, refused):
    whole = ["task.train_size=null", "task.test_size=null"]  # coverage is of hundreds of scores
    words = [*TINY, *whole, "partition.holdout=0.2", "partition=iid"]
    run_recipe(tmp_path, *words)
    main([str(tmp_path), "--splits", "5", "--federated", "--reference", "0.95"])
    folder = tmp_path / "conformal"
    written = {"conformal.json", "conformal.md", "conformal_coverage.png", "conformal_coverage.svg"}
    assert {path.name for path in folder.iterdir()} >= written
    content = json.loads((folder / "conformal.json").read_text())
    assert content["options"]["reference"] == 0.95
    [run] = content["runs"]
    first = run["centralised"]["APS"]
    place = first["levels"].index(0.1)
    assert np.mean([row[place] for row in first["coverage"]]) == pytest.approx(0.9, abs=0.05)
    assert run["sketched"]["RAPS"]["calibration"] > 150  # at the clients
    assert "coverage" in capsys.readouterr().out
    summary = read_summary(tmp_path)
    summary["data"]["test"]["sha256"] = "another"
    write_summary(tmp_path, summary)
    assert "the test set has changed" in refused(main, tmp_path)
