"""A simulation of so many clients that each is asked when it is first drawn."""

import shutil

import pytest

from fedhet.common.results import read_summary
from tests.federation import InProcessGrid
from tests.recipes import TINY, run_recipe

SIX = (*TINY, "partition=iid", "clients=6", "checkpoint.every=1")


@pytest.fixture(autouse=True)
def asked_when_drawn(monkeypatch):
    """Six clients are many, and their nodes are a range, as on the engine of runtime=local."""
    monkeypatch.setattr("fedhet.strategies.round.registration._MOST_ASKED", 5)
    nodes = lambda grid: range(min(grid.handlers), max(grid.handlers) + 1)  # noqa: E731
    monkeypatch.setattr(InProcessGrid, "get_node_ids", nodes)


@pytest.mark.slow
def test_steps_that_do_not_wait_resume_to_the_same_bits(tmp_path):
    """Who was in flight has not been asked by the new process."""
    words = (*SIX, "strategy=fedbuff", "strategy.asynchronous.buffer=2", "participation=0.5")
    whole = run_recipe(tmp_path / "whole", *words, "system=lognormal", "rounds=4", clients=6)
    half = run_recipe(tmp_path / "half", *words, "system=lognormal", "rounds=2", clients=6)
    assert half["parameters_sha256"] != whole["parameters_sha256"]
    more = ("system=lognormal", "rounds=4", "resume=true")
    resumed = run_recipe(tmp_path / "half", *words, *more, clients=6)
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]


@pytest.mark.slow
def test_clients_that_were_never_drawn_calibrate_too(tmp_path):
    words = (*SIX, "partition.holdout=0.3", "participation=0.34", "calibration.alphas=[0.1]")
    summary = run_recipe(tmp_path / "run", *words, "rounds=1", clients=6)
    assert summary["prediction_sets"]["clients"] == list(range(6))
    shutil.copytree(tmp_path / "run", tmp_path / "end")
    (tmp_path / "end/summary.json").unlink()  # killed between its last checkpoint and its summary
    run_recipe(tmp_path / "end", *words, "rounds=1", "resume=true", clients=6)
    assert read_summary(tmp_path / "end")["prediction_sets"] == summary["prediction_sets"]


@pytest.mark.slow
def test_all_clients_columns_are_fitted_together(tmp_path):
    table = tmp_path / "table.csv"
    rows = [f"{n},{'AB'[n % 2]},{'yes' if n % 3 else 'no'}" for n in range(60)]
    table.write_text("\n".join(["age,town,y", *rows]) + "\n")
    columns = ["fit=federated", "numeric=[age]", "categorical=[town]"]
    words = ["task=tabular", f"task.path={table}", "task.target=y"]
    words += ["task.classes=[no,yes]", *(f"task.data_options.{w}" for w in columns)]
    more = ("partition=iid", "clients=6", "rounds=1", "local.batch_size=8")
    summary = run_recipe(tmp_path / "run", *words, *more, clients=6)
    assert summary["status"] == "completed"
