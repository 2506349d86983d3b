"""Recipes that share what the files give are those that Hydra composes one by one."""

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from omegaconf import OmegaConf

from fedhet.conf import FOLDER
from fedhet.conf.composition import composed

MAP = "_create_interpolation_map"
FILES = ("strategy=[feddw,moon]", "schedule=cosine", "+experiment=maecho/golden")


@pytest.mark.slow
@pytest.mark.parametrize(
    "values",
    [
        ("seed=3", "strategy.feddw.mu=2", "schedule.floor=.1"),
        ("+task.lora.r=8", "~local.lr", "++a.b=[1,{c:2}]", "local.optimizers={sgd:{_target_:a.B}}"),
        ("clients=5", "server.lr=${local.lr}", "strategy.personal='a,b'", "clients=6"),
    ],
)
def test_values_on_top_of_kept_files_give_hydras_recipe(values, monkeypatch):
    words = [FILES[0], *values, *FILES[1:]]
    composed((*FILES, "rounds=7"))  # whose files are kept
    found = composed(words)
    for owner, name in ((ConfigRepository, "load_config"), (defaults_list, MAP)):
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)  # Hydra's own
    with initialize_config_dir(config_dir=str(FOLDER), version_base="1.3"):
        expected = compose(config_name="config", overrides=words)
    assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
    with pytest.raises(AttributeError, match="is not in struct"):
        found.nothing = 1
    assert "a" not in composed(FILES)  # the kept ones are as they were
