"""The task's model at the server, and outputs of another architecture."""

import torch
from torch import nn

from fedhet.conf import compose, plain_part
from fedhet.server_app.assembly import server_model_of
from fedhet.strategies.base import Reply
from fedhet.strategies.components.aggregators import WeightedMean
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.round.evaluation import ClientMetrics
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.wire.records import to_tensors
from fedhet.tasks import build_task
from tests.federation import Regression, federate
from tests.recipes import TINY, overrides
from tests.refused import refused
from tests.strategies.round.test_round import BUFFERS, OPTIONS, Normed, clients
from tests.strategies.sides import built


class Watching(WeightedMean):
    def bind(self, server_model: ServerModel) -> None:
        self.server_model, self.held = server_model, []

    def __call__(self, params, replies):
        weight = self.server_model.model.head.weight.detach().clone()
        self.held.append((weight, params["head.weight"]))
        return super().__call__(params, replies)


class Setting(WeightedMean):
    def __call__(self, params, replies):
        ones = {"norm.running_mean": torch.ones(2, dtype=torch.float64)}
        return {**super().__call__(params, replies), **ones}


class Another:
    def build_model(self, tensors):
        return nn.Identity()


def run(strategy: FedAvg, rounds: int = 1, model=lambda: Regression(2)) -> dict:
    return federate(strategy, clients(), model=model, rounds=rounds, options=OPTIONS)[0]


def test_during_a_server_step_the_model_holds_the_tensors_that_were_sent():
    aggregator, model, sent = Watching(), Regression(2), []

    class Overwriting(FedAvg):
        def configure_train(self, round, arrays, config, grid):
            nn.init.constant_(model.head.weight, 99.0)
            sent.append(to_tensors(arrays)["head.weight"])
            return super().configure_train(round, arrays, config, grid)

    task_model = ServerModel(model, (2,), 1)
    run(built(Overwriting, aggregator=aggregator, server_model=task_model, local_lr=0.05), rounds=3)
    held = torch.stack([torch.stack(both) for both in aggregator.held])
    assert torch.equal(held, torch.stack([torch.stack([x, x]) for x in sent]))
    assert not torch.equal(sent[1], sent[2])


def test_a_clients_model_is_what_was_sent_plus_the_changes_of_weights_and_buffers():
    found = ServerModel(Normed(), (2,), 1)
    mean = torch.tensor([1.0, 2.0], dtype=torch.float64)
    found.load({"norm.running_mean": mean, "head.weight": torch.zeros(1, 2)})
    moved = {"norm.running_mean": torch.tensor([0.5, 3.0])}
    update = {"head.weight": torch.tensor([[4.0, 5.0]])}
    trained = found.trained(Reply(0, 1, 1, 0.1, update, buffers=moved))
    assert trained.keys() == {*moved, *update}
    assert trained["norm.running_mean"].tolist() == [1.5, 5.0]
    assert trained["head.weight"].tolist() == [[4.0, 5.0]]
    assert torch.equal(found.model.norm.running_mean, mean)


def test_an_aggregator_may_move_buffers_itself():
    left, right = (
        run(built(FedAvg, aggregator=one, buffers=BUFFERS, local_lr=0.05), model=Normed)
        for one in (Setting(), WeightedMean())
    )
    assert left.pop("norm.running_mean").tolist() == [1.0, 1.0]
    assert right.pop("norm.running_mean").tolist() != [1.0, 1.0]
    assert "norm.running_var" in left
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_parts_that_cannot_run_are_refused():
    with refused("evaluation.clients=true", "strategy/output"):
        built(FedAvg, output=Another(), client_metrics=ClientMetrics(asked=True))
    with refused("aggregator Watching", "server_model="):
        built(FedAvg, aggregator=Watching())


def test_black_and_white_follow_the_tasks_normalisation():
    """(0 - mean) / std and (1 - mean) / std of an image."""
    recipe = compose(overrides(*TINY, "task.mean=[0.25]", "task.std=[0.5]"))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    found = server_model_of(build_task(*parts, seed=0, num_clients=3), nn.Linear(1, 1))
    assert (found.input_shape, found.num_classes) == ((1, 8, 8), 10)
    assert (found.black.tolist(), found.white.tolist()) == ([-0.5], [1.5])
