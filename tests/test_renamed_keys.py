"""Keys of before: refused on the command line with today's name, and converted in old configs."""

import pytest

from fedhet.conf import compose
from fedhet.conf.renamed import upgrade_config
from tests.recipes import overrides
from tests.refused import refused

OLD = [
    ("strategy.client_sides.fedprox.mu=0.1", "strategy.fedprox.mu=0.1"),
    ("strategy.option=I", "strategy.scaffold.option=I strategy.fedpvr.option=I"),
    ("strategy.layers=last:2", "strategy.fedpvr.layers=last:2"),
    ("local.solver=adam", "local.solver local.optimizer=adam"),
    ("+local.solvers.adam.eps=1", "local.optimizers.adam.eps=1"),
    ("local.trained_by=/a/b", "local.reuse_training=/a/b"),
]


@pytest.mark.parametrize(("word", "message"), OLD)
def test_an_old_key_is_refused_with_its_new_name(word, message):
    with refused(*message.split()):
        compose(overrides("strategy=fedprox", word))


def test_an_old_config_gets_the_names_of_today():
    side = "strategies.scaffold.ControlVariateClient"
    old = {
        "rounds": 1,
        "strategy": {
            "aggregator": {"_target_": "strategies.aggregators.UniformMean"},
            "transforms": {},
            "methods": {"fedsam": ["solver"], "scaffold": []},
            "requires": {"local.solver": "sam"},
            "client_sides": {"scaffold": {"_target_": side, "option": "II"}},
            "option": "II",
        },
        "local": {"solver": "sam", "solvers": {"sam": {"_target_": "strategies.solvers.SGD"}}},
    }
    new = upgrade_config(old)
    assert new == {
        "rounds": 1,
        "strategy": {
            "aggregator": {"_target_": "fedhet.strategies.components.aggregators.UniformMean"},
            "transforms": {},
            "methods": {"fedsam": ["optimizer"], "scaffold": []},
            "requires": {"local.optimizer": "sam"},
            "client_sides": {"scaffold": {"_target_": f"fedhet.{side}", "option": "II"}},
            "scaffold": {"option": "II"},
        },
        "local": {
            "optimizer": "sam",
            "optimizers": {
                "sam": {"_target_": "fedhet.strategies.components.local_optimizers.SGD"}
            },
        },
    }
    assert upgrade_config(new) == new
    mu = {"fedprox": {"mu": 0.3}}  # the side keeps it, too
    assert upgrade_config({"strategy": {"client_sides": mu}})["strategy"] == {
        "client_sides": mu,
        **mu,
    }


def test_flat_settings_are_converted_as_nested_ones():
    flat = {
        "strategy.client_sides.fedpvr.option": "I",
        "strategy.option": "I",
        "strategy.layers": "last:2",
        "strategy.methods.fedsam": ["solver"],
        "strategy.requires.local.solver": "sam",
        "schedule._target_": "strategies.schedules.Cosine",
        "local.trained_by": None,
    }
    assert upgrade_config(flat) == {
        "strategy.client_sides.fedpvr.option": "I",
        "strategy.fedpvr.option": "I",
        "strategy.fedpvr.layers": "last:2",
        "strategy.methods.fedsam": ["optimizer"],
        "strategy.requires.local.optimizer": "sam",
        "schedule._target_": "fedhet.strategies.components.schedules.Cosine",
        "local.reuse_training": None,
    }
