"""How many jobs a sweep has, and which sweeps are refused."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from fedhet.sweep.plan import SweepPlan, plan_sweep

BASIC = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}
SEARCH = {"_target_": "hydra_plugins.a_search.Sweeper", "direction": "maximize"}
SEARCH |= {"n_trials": 20, "n_jobs": 2}


def test_a_grid_has_the_product_of_its_values_and_a_search_its_trials():
    words = ["task=digits", "strategy=fedavg,scaffold", "seed=range(3)", "local.lr=0.1"]
    assert plan_sweep(words, "accuracy", BASIC) == SweepPlan(6, 6, ["strategy", "seed"])
    batches = {**BASIC, "max_batch_size": 2}
    assert plan_sweep(["seed=0,1,2"], "accuracy", batches).batch_size == 2
    # a typed word replaces that of the experiment file
    sweeper = {**BASIC, "params": {"strategy": "fedavg,scaffold", "seed": "0,1,2"}}
    assert plan_sweep(["seed=0"], "accuracy", sweeper) == SweepPlan(2, 2, ["strategy"])
    found = plan_sweep(["seed=1", "local.lr=interval(0.01,1)"], "accuracy", SEARCH)
    assert found == SweepPlan(20, 2, ["local.lr"])
    assert plan_sweep([], "loss", {**SEARCH, "direction": "minimize"}).total == 20


@pytest.mark.parametrize(
    ("words", "objective", "changes", "message"),
    [
        (["+results_dir=x"], "accuracy", {}, "results_dir .* hydra.sweep.dir"),
        (["resume=true"], "accuracy", {}, "fedhet -m --resume FOLDER"),
        ([], "acuracy", {}, "objective=acuracy .* allowed: accuracy, best_accuracy, loss"),
        ([], "loss", {}, "objective=loss is better when it is smaller.*direction=minimize"),
        ([], "accuracy", {"storage": "sqlite://"}, "hydra.sweeper.storage=sqlite://.*--resume"),
        ([], "accuracy", {"n_jobs": -1}, "hydra.sweeper.n_jobs=-1"),
    ],
)
def test_bad_sweeps_are_refused(words, objective, changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_sweep(words, objective, {**SEARCH, **changes})
