"""fedhet-tune: the choice by the held-out score, and a run that says so."""

import json
import shutil
from dataclasses import replace

import pytest
import yaml

from fedhet.conf import compose, fingerprint
from fedhet.sweep.resume import FolderTaken
from fedhet.sweep.sweep_folder import Sweep, SweepFolder
from fedhet.tools import tune as module
from fedhet.tools.tune import (
    CHOICES,
    Candidate,
    Score,
    TuningSearch,
    cell_name,
    expanded,
    main,
    tune,
)
from tests.processes import Fork, finish
from tests.recipes import TINY
from tests.refused import refused

GRID = ["local.lr=0.1,0.2", "schedule=constant,cosine"]
ACCURACY = Score("client_accuracy", maximises=True)


def test_cells_are_the_combinations_of_values_named_by_what_differs():
    rates, schedules = (0.1, 0.2), ("constant", "cosine")
    assert expanded(GRID) == [
        [f"local.lr={rate}", f"schedule={name}"] for rate in rates for name in schedules
    ]
    cells = expanded(["strategy=fedavg,[moon,feddw]", "rounds=3"])
    names = [cell_name(number, cell, cells) for number, cell in enumerate(cells)]
    assert names == ["0_fedavg", "1_-moon-feddw-"]
    assert cell_name(0, ["rounds=3"], [["rounds=3"]]) == "0"


def test_the_best_score_is_chosen_and_of_equal_ones_the_lowest_loss():
    figures = [(0.5, 1.0), (0.6, 2.0), (0.6, 1.5), (None, None)]
    points = [Candidate([str(number)], *pair) for number, pair in enumerate(figures)]
    assert ACCURACY.best(points).words == ["2"]
    assert Score("client_rmse", maximises=False).best(points).words == ["0"]
    assert ACCURACY.best(points[3:]) is None


@pytest.mark.slow
def test_candidates_are_compared_by_the_objective_where_it_is_held_out():
    def of(*words):
        return module.score_of(compose({"overrides": json.dumps(words)}))

    loss = Score("client_loss", maximises=False)
    metrics = "evaluation.metrics=[f1,json:loads]"
    assert of("task=digits") == ACCURACY
    assert of("task=digits", metrics, "objective=best_f1") == Score("client_f1", maximises=True)
    own = ("task=digits", "strategy=ditto", "evaluation.model=clients", metrics)
    assert of(*own) == Score("personal_accuracy", maximises=True)
    assert of(*own, "objective=f1") == Score("personal_f1", maximises=True)
    assert of("task=shapes") == of("task=digits", "objective=loss") == loss
    assert of("task=shapes", "evaluation.metrics=[accuracy]") == ACCURACY
    rmse = ("task.kind=regression", "evaluation.metrics=[rmse]", "objective=rmse")
    assert of("task=synthetic", *rmse) == Score("client_rmse", maximises=False)
    lowest = (metrics, "objective=loads", "early_stopping.metric=loads", "early_stopping.mode=min")
    assert of("task=digits", *lowest) == Score("client_loads", maximises=False)
    with refused("objective=seconds"):
        of("task=digits", "objective=seconds")
    with refused("objective=loads", "early_stopping.mode="):
        of("task=digits", *lowest[:3])
    with refused("objective=loads", "early_stopping.metric="):
        of("task=digits", *lowest[:2], lowest[3])
    with refused("objective=loss", "evaluation.model=clients"):
        of(*own, "objective=loss")


@pytest.mark.flower
def test_methods_with_models_of_the_clients_own_are_chosen_by_these(tmp_path, monkeypatch):
    """Ditto's coefficient does not touch the shared model, by which all candidates are equal."""
    monkeypatch.setattr(module, "_launch", lambda words: finish(Fork(tmp_path, *words))[0])
    words = "task=digits strategy=ditto clients=3 rounds=2 local.epochs=1 partition.holdout=0.3"
    words += " partition.alpha=0.1 --grid strategy.ditto.coefficient=5,0 --out"
    main([*words.split(), str(tmp_path / "tuned")])
    found = json.loads((tmp_path / "tuned" / CHOICES).read_text())["0"]
    five, none = (one["score"] for one in found["candidates"])
    assert five < none
    assert found["chosen"] == ["strategy.ditto.coefficient=0"]
    jobs = SweepFolder(tmp_path / "tuned" / "search" / "0").jobs().values()
    assert len({job["figures"]["client_accuracy"] for job in jobs}) == 1


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Let no run start: the search's jobs report, the later the better but for a failed last."""
    calls = []

    def launch(words):
        calls.append(words)
        if words[0] == "-m" and words[1] != "--resume":
            folder = SweepFolder(tmp_path / "search" / "0")
            folder.path.mkdir(parents=True)
            jobs = []
            for n, point in enumerate(expanded(GRID)):
                figures = {"accuracy": 1 - n / 10, "client_accuracy": 0.4 + n / 10}
                about = {"number": n, "overrides": ["task=digits", *point], "figures": figures}
                status = "failed" if n == 3 else "completed"
                jobs.append({"folder": str(n), "status": status, **about})
            typed = [word for word in words[1:] if not word.startswith("hydra.sweep.dir")]
            folder.write(Sweep(typed, began="now", total=4, status="failed"), jobs)
        return 0

    monkeypatch.setattr(module, "_launch", launch)
    return calls


def tune_in(folder, cell=("task=digits",), grid=GRID, rounds=2, points=None):
    tune(list(cell), "0", points or expanded(grid), TuningSearch(grid, rounds, folder), ACCURACY)


def completed(run, *words):
    recipe = compose({"overrides": json.dumps(["task=digits", *words])})
    run.mkdir(parents=True, exist_ok=True)
    summary = {"status": "completed", "fingerprint": fingerprint(recipe)}
    (run / "summary.json").write_text(json.dumps(summary))


@pytest.mark.slow
def test_it_searches_chooses_logs_and_runs_and_again_resumes_and_skips(tmp_path, launched):
    completed(tmp_path / "runs" / "0", "local.lr=0.1", "schedule=constant")  # of another choice
    with refused(str(tmp_path / "runs" / "0"), kind=FolderTaken):
        tune_in(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "0")
    tune_in(tmp_path)
    search, again, run = launched
    assert again == ["-m", "--resume", str(tmp_path / "search" / "0")]
    assert search[:5] == ["-m", "task=digits", *GRID, "objective=client_accuracy"]
    assert {"rounds=2", "hydra.sweeper.params=null", "evaluation.clients=true"} <= {*search}
    assert run[:3] == ["task=digits", "local.lr=0.2", "schedule=constant"]
    said = "schedule=constant, by client_accuracy 0.6000 on held-out examples after round 2"
    assert said in run[3]
    logged = json.loads((tmp_path / CHOICES).read_text())["0"]
    assert logged["chosen"] == ["local.lr=0.2", "schedule=constant"]
    assert [one["score"] for one in logged["candidates"]] == [0.4, 0.5, 0.4 + 2 / 10, None]
    assert logged["words"].endswith("the best of 3")
    completed(tmp_path / "runs" / "0", "local.lr=0.2", "schedule=constant")
    tune_in(tmp_path)
    assert launched[3:] == [["-m", "--resume", str(tmp_path / "search" / "0")]]


def test_another_search_in_the_same_folder_is_refused(tmp_path, launched):
    with refused("candidate of 0 ", kind=ValueError):
        tune_in(tmp_path, points=expanded(["local.lr=7,8"]))
    for other in ({"cell": ["task=mnist"]}, {"grid": ["local.lr=0.1,0.2"]}, {"rounds": 3}):
        with refused("task=digits", kind=ValueError):
            tune_in(tmp_path, **other)
    assert len(launched) == 1


@pytest.mark.slow
@pytest.mark.parametrize("status", ["stopped", "running"])
def test_no_choice_is_made_of_a_search_that_was_cut_short(tmp_path, launched, status):
    tune_in(tmp_path)
    sweep = SweepFolder(tmp_path / "search" / "0")
    sweep.write(replace(sweep.read(), status=status), sweep.jobs().values())
    with refused(status):
        tune_in(tmp_path)
    assert launched[-1] == ["-m", "--resume", str(sweep.path)]


@pytest.mark.slow
def test_what_cannot_be_chosen_is_refused_before_anything_runs(tmp_path, launched, refused):
    words = ["--out", tmp_path, "task=digits"]
    assert "partition.holdout=0.0: " in refused(main, *words)
    assert "nothing" in refused(main, *words, "partition.holdout=0.1", "nothing=1")
    assert "objective=rounds" in refused(main, *words, "partition.holdout=0.1", "objective=rounds")
    assert launched == []


@pytest.mark.flower
def test_with_real_runs_the_choice_is_in_config_yaml(tmp_path):
    words = [*TINY, "partition.holdout=0.2", "runtime=local", "rounds=2"]
    main([*words, "--grid", "local.lr=0.0001,0.2", "--rounds", "1", "--out", str(tmp_path)])
    config = yaml.safe_load((tmp_path / "runs" / "0" / "config.yaml").read_text())
    assert config["local"]["lr"] == 0.2
    assert config["choice"].startswith("local.lr=0.2, by client_accuracy 0.")
    assert (config["rounds"], config["evaluation"]["clients"]) == (2, False)
    logged = json.loads((tmp_path / CHOICES).read_text())["0"]["candidates"]
    assert logged[0]["score"] < logged[1]["score"]
