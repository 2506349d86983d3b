"""What a sweep will be, and what cannot be one."""

from __future__ import annotations

from typing import Any

import pytest

from fedhet.sweep.plan import Survey, survey
from fedhet.sweep.sweep_folder import SweepRefused

BASIC: dict[str, Any] = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}
SEARCH: dict[str, Any] = {
    "_target_": "hydra_plugins.a_search.Sweeper",
    "direction": "maximize",
    "n_trials": 20,
    "n_jobs": 2,
}


def test_a_grid_has_the_product_of_its_values() -> None:
    words = ["task=digits", "strategy=fedavg,scaffold", "seed=range(3)", "local.lr=0.1"]
    assert survey(words, "accuracy", BASIC) == Survey(6, 6, ["strategy", "seed"])


def test_a_typed_word_goes_before_that_of_the_experiment_file() -> None:
    sweeper = {**BASIC, "params": {"strategy": "fedavg,scaffold", "seed": "0,1,2"}}
    assert survey(["seed=0"], "accuracy", sweeper) == Survey(2, 2, ["strategy"])


def test_no_more_jobs_are_together_than_a_batch_has() -> None:
    assert survey(["seed=0,1,2"], "accuracy", {**BASIC, "max_batch_size": 2}).together == 2


def test_a_search_has_its_trials() -> None:
    found = survey(["seed=1", "local.lr=interval(0.01,1)"], "accuracy", SEARCH)
    assert found == Survey(20, 2, ["local.lr"])


@pytest.mark.parametrize(
    ("words", "objective", "changes", "message"),
    [
        (["results_dir=x"], "accuracy", {}, "results_dir .* hydra.sweep.dir"),
        (["+results_dir=x"], "accuracy", {}, "results_dir .* hydra.sweep.dir"),
        (["resume=true"], "accuracy", {}, "fedhet -m --resume FOLDER"),
        ([], "acuracy", {}, "objective=acuracy .* allowed: accuracy, best_accuracy, loss"),
        ([], "loss", {}, "objective=loss is better when it is smaller.*direction=minimize"),
        ([], "accuracy", {"storage": "sqlite://"}, "hydra.sweeper.storage=sqlite://.*--resume"),
        ([], "accuracy", {"n_jobs": -1}, "hydra.sweeper.n_jobs=-1"),
    ],
)
def test_what_cannot_be_a_search_is_refused(
    words: list[str], objective: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SweepRefused, match=message):
        survey(words, objective, {**SEARCH, **changes})


def test_a_search_may_minimize() -> None:
    assert survey([], "loss", {**SEARCH, "direction": "minimize"}).total == 20
