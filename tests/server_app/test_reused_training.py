"""Runs that reuse the clients' models of another run in place of training."""

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigError
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow

ONE = [*TINY, "rounds=1", "local.epochs=1", "local.momentum=0.5", "local.initial=own"]
TRAINED = [*ONE, "strategy=ensemble"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_recipe(folder, *TRAINED, "checkpoint.client_models=true")
    return folder


@pytest.mark.parametrize("strategy", ["maecho", "regmean"])
def test_nothing_is_trained_and_the_result_is_the_same(strategy, trained, tmp_path, monkeypatch):
    words = [*ONE, f"strategy={strategy}"]
    plain = run_recipe(tmp_path / "plain", *words)
    monkeypatch.delattr("client_app.client.train_locally")
    again = run_recipe(tmp_path / "again", *words, f"local.reuse_training={trained}")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "again"))
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert plain["accuracy"] == pytest.approx(again["accuracy"], abs=0.003)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=1"], "seed=0 there and 1 here"),
        (["local.epochs=2"], "local.epochs=1 there and 2 here"),
        (["partition.alpha=3.0"], "3.0 here"),
        (["strategy=[ensemble,fedprox]"], "strategy.client_sides.fedprox"),
        (["rounds=2"], "set rounds=1"),
        (["local.reuse_training=/no/run"], "checkpoint.client_models=true"),
    ],
)
def test_a_run_that_trained_differently_is_refused(words, said, trained, tmp_path):
    with pytest.raises(ConfigError, match=r"another way|rounds=1|client_models") as refusal:
        run_recipe(tmp_path, *TRAINED, f"local.reuse_training={trained}", *words)
    assert said in str(refusal.value)
