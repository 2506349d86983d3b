"""The task's model at the server, and outputs of another architecture."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from common.errors import ConfigError
from conf import compose, plain_part
from server_app.assembly import server_model_of
from strategies.base import Reply
from strategies.components.aggregators import WeightedMean
from strategies.fedavg import FedAvg
from strategies.round.records import to_tensors
from strategies.round.server_model import ServerModel
from tasks import build_task
from tests.federation import Regression, federate
from tests.recipes import overrides
from tests.strategies.round.test_round import OPTIONS, Normed, clients


class Watching(WeightedMean):
    """The mean; records the tensors of the server model when it is called."""

    def __init__(self) -> None:
        self.held: list[tuple[dict, dict]] = []

    def bind(self, server_model: ServerModel) -> None:
        self.server_model = server_model

    def __call__(self, params, replies):
        state = self.server_model.model.state_dict()
        self.held.append(({name: value.clone() for name, value in state.items()}, dict(params)))
        return super().__call__(params, replies)


class Setting(WeightedMean):
    """The mean, with running means that move by 1."""

    def __call__(self, params, replies):
        ones = {"norm.running_mean": torch.ones(2, dtype=torch.float64)}
        return {**super().__call__(params, replies), **ones}


class Another:
    """An output of another architecture."""

    def __call__(self, params, update, stepped, replies):
        return {"answer": update["head.weight"] + 42.0}

    def build_model(self, tensors):
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.data.copy_(tensors["answer"])
        return layer


def run(strategy: FedAvg, rounds: int = 1, model=lambda: Regression(2)) -> dict:
    return federate(strategy, clients(), model=model, rounds=rounds, options=OPTIONS)[0]


def test_during_a_server_step_the_model_holds_the_tensors_that_were_sent():
    """In every round, whatever is written into the model in between, as evaluation does."""
    aggregator, model, sent = Watching(), Regression(2), []

    class Overwriting(FedAvg):
        def configure_train(self, round, arrays, config, grid):
            nn.init.constant_(model.head.weight, 99.0)
            sent.append(to_tensors(arrays))
            return super().configure_train(round, arrays, config, grid)

    task_model = ServerModel(model, (2,), 1)
    run(Overwriting(aggregator=aggregator, server_model=task_model, local_lr=0.05), rounds=3)
    assert len(aggregator.held) == 3
    for (held, params), x in zip(aggregator.held, sent, strict=True):
        assert torch.equal(held["head.weight"], x["head.weight"])
        assert torch.equal(params["head.weight"], x["head.weight"])
    assert not torch.equal(sent[1]["head.weight"], sent[2]["head.weight"])


def test_a_clients_model_is_what_was_sent_plus_the_changes_of_weights_and_buffers():
    found = ServerModel(Normed(), (2,), 1)
    mean = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found.load({"norm.running_mean": mean, "head.weight": torch.zeros(1, 2)})
    update = {"head.weight": torch.tensor([[4.0, 5.0]])}
    buffers = {"norm.running_mean": torch.tensor([0.5, 3.0])}
    trained = found.trained(Reply(0, 1, 1, 0.1, update, buffers=buffers))
    assert {name: value.tolist() for name, value in trained.items()} == {
        "norm.running_mean": [1.5, 5.0],
        "head.weight": [[4.0, 5.0]],
    }
    assert torch.equal(found.model.norm.running_mean, mean)


def test_an_aggregator_may_move_buffers_itself():
    """The running means move by 1; the variances by the clients' mean change."""
    buffers = ["norm.running_mean", "norm.running_var"]
    left, right = (
        run(FedAvg(aggregator=one, buffers=buffers, local_lr=0.05), model=Normed)
        for one in (Setting(), WeightedMean())
    )
    assert left.pop("norm.running_mean").tolist() == [1.0, 1.0]
    assert right.pop("norm.running_mean").tolist() != [1.0, 1.0]
    assert "norm.running_var" in left
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_an_output_of_another_architecture_survives_a_resume():
    strategy, resumed = (FedAvg(output=Another(), local_lr=0.05) for _ in range(2))
    output_model = run(strategy)
    assert output_model.keys() == {"answer"}
    resumed.restore(strategy.snapshot())
    again = run(resumed)
    assert torch.equal(again["answer"], output_model["answer"])
    layer = resumed.server_step.build_output_model(again)
    assert torch.equal(layer.weight.double(), again["answer"].float().double())


def test_parts_that_cannot_run_are_refused():
    with pytest.raises(ConfigError, match=r"evaluation.clients=true.*Another.*set it to false"):
        FedAvg(output=Another(), evaluate_on_clients=True)
    with pytest.raises(ConfigError, match=r"aggregator Watching runs the model.*server_model=Serv"):
        FedAvg(aggregator=Watching())


@pytest.mark.slow
def test_black_and_white_follow_the_tasks_normalisation():
    """(0 - mean) / std and (1 - mean) / std of an image; a text has neither."""

    def server_model(word: str) -> ServerModel:
        recipe = compose(overrides(word))
        parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
        return server_model_of(build_task(*parts, seed=0, num_clients=3), nn.Linear(1, 1))

    cifar, imdb = server_model("task=cifar10"), server_model("task=imdb")
    assert (cifar.input_shape, cifar.num_classes) == ((3, 32, 32), 10)
    mean = torch.tensor([0.4914, 0.4822, 0.4465])
    std = torch.tensor([0.2023, 0.1994, 0.2010])
    torch.testing.assert_close(cifar.black, -mean / std)
    torch.testing.assert_close(cifar.white, (1 - mean) / std)
    assert (imdb.black, imdb.white, imdb.input_shape) == (None, None, (200,))
