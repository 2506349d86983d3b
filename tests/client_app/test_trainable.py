"""Clients that cannot train are named at the start, with the reason."""

import json
import logging

import pytest
import torch
from torch import nn

from fedhet.client_app.trainable import why_not
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.per_fedavg import PerFedAvgOptimizer
from tests.federation import TensorBatches
from tests.recipes import TINY, run_recipe


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = norm, nn.Linear(4, 2)

    def forward(self, inputs):
        return inputs, self.head(self.norm(inputs))


def normed_mlp() -> nn.Module:
    layers = [nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)]
    return nn.Sequential(*layers)


def data(size: int) -> TensorBatches:
    return TensorBatches(torch.randn(size, 4), torch.zeros(size, dtype=torch.long))


@pytest.mark.parametrize(
    ("size", "options", "fails"),
    [
        (1, {}, True),
        (1, {"drop_last": True}, True),
        (33, {}, True),
        (33, {"drop_last": True}, False),
        (33, {"epochs": None, "steps": 1}, False),
        (33, {"epochs": None, "steps": 2}, True),
        (34, {}, False),
        (5, {"batch_size": 1}, True),
    ],
)
def test_a_batch_of_one_example_and_batchnorm_cannot_train(size, options, fails):
    options, examples = LocalTrainingConfig(**options), data(size)
    model, others = Normed(nn.BatchNorm1d(4)).eval(), (nn.LayerNorm(4), nn.GroupNorm(2, 4))
    before, draws = {n: v.clone() for n, v in model.state_dict().items()}, torch.get_rng_state()
    assert ("BatchNorm" in why_not(model, examples, options, SGD())) == fails
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), draws)
    assert not model.training
    assert all(why_not(Normed(other), examples, options, SGD()) == "" for other in others)


def test_groups_of_one_value_no_example_and_too_few_batches_are_told():
    options = LocalTrainingConfig(batch_size=8)
    assert "normalise" in why_not(Normed(nn.GroupNorm(4, 4)), data(1), options, SGD())
    assert why_not(Normed(nn.Identity()), data(0), options, SGD()) == "no training example"
    optimizer = PerFedAvgOptimizer(alpha=0.1, order="hessian_free")
    assert "local.epochs" in why_not(Normed(nn.Identity()), data(16), options, optimizer)
    assert why_not(Normed(nn.Identity()), data(24), options, optimizer) == ""


@pytest.mark.slow
def test_the_start_of_a_run_names_clients_that_cannot_train(tmp_path, caplog):
    """100 examples of three clients: 34, 33, 33, in batches of 32."""
    words = [*TINY, "clients=3", "partition=iid", "task.train_size=100"]
    words += [f"task.model={__name__}:normed_mlp"]
    with caplog.at_level(logging.WARNING, "flwr"):
        run_recipe(tmp_path, *words, "rounds=1", "local.batch_size=32")
    said = [one.message for one in caplog.records if "cannot train" in one.message]
    failures = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["failures"]
    assert len(said) == 1
    assert said[0].startswith("2 clients cannot train")
    assert "[1, 2]" in said[0]
    assert [failure.partition(":")[0] for failure in failures] == ["client 1", "client 2"]
