"""The opening to the network: who gets it, what it holds, and what may come back."""

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
from strategies.round.server_model import BuildsOutputModel, ServerModel
from tasks import build_task
from tests.federation import Regression, TensorBatches, federate
from tests.recipes import TINY, overrides, run_recipe
from tests.strategies.round.test_round import OPTIONS, clients


class Normed(nn.Module):
    """A head on normalised inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1, bias=False)

    def forward(self, inputs):
        """Return (features, logits)."""
        features = self.norm(inputs)
        return features, self.head(features)


class Watching(WeightedMean):
    """The mean; notes what the network holds when it is called."""

    def __init__(self) -> None:
        self.held: list[tuple[dict, dict]] = []

    def bind(self, network: ServerModel) -> None:
        """Take the network."""
        self.network = network

    def __call__(self, params, replies):
        """Return the mean."""
        held = {name: value.clone() for name, value in self.network.model.state_dict().items()}
        self.held.append((held, dict(params)))
        return super().__call__(params, replies)


class Setting(WeightedMean):
    """The mean, with buffers that move by 1; with ``bind``, so that it is like what uses that."""

    def __call__(self, params, replies):
        """Return the mean, and 1 for each buffer of the running means."""
        ones = {"norm.running_mean": torch.ones(2)}
        return {**super().__call__(params, replies), **ones}


def network(model: nn.Module) -> ServerModel:
    return ServerModel(model, (2,), 1)


def test_while_slots_are_called_the_network_holds_what_was_sent():
    """In every round, whatever is written into the model in between, as evaluation does."""
    aggregator, model = Watching(), Regression(2)
    strategy = FedAvg(aggregator=aggregator, network=network(model), local_lr=0.05)
    sent, start = [], strategy.configure_train

    def configure_train(round, arrays, config, grid):
        nn.init.constant_(model.head.weight, 99.0)
        sent.append(to_tensors(arrays))
        return start(round, arrays, config, grid)

    strategy.configure_train = configure_train
    federate(strategy, clients(), model=lambda: Regression(2), rounds=3, options=OPTIONS)
    assert len(aggregator.held) == 3
    for (held, params), x in zip(aggregator.held, sent, strict=True):
        assert torch.equal(held["head.weight"], x["head.weight"])
        assert torch.equal(params["head.weight"], x["head.weight"])
    assert not torch.equal(sent[1]["head.weight"], sent[2]["head.weight"])


def test_what_was_trained_is_what_was_sent_and_the_changes():
    """Buffers too: 1 + .5 and 2 + 3."""
    model = Normed()
    found = network(model)
    found.load({"norm.running_mean": torch.tensor([1.0, 2.0]), "head.weight": torch.zeros(1, 2)})
    reply = Reply(
        client_id=0,
        num_examples=1,
        num_steps=1,
        lr_sum=0.1,
        update={"head.weight": torch.tensor([[4.0, 5.0]])},
        buffers={"norm.running_mean": torch.tensor([0.5, 3.0])},
    )
    trained = found.trained(reply)
    assert trained.keys() == {"head.weight", "norm.running_mean"}
    assert trained["norm.running_mean"].tolist() == [1.5, 5.0]
    assert trained["head.weight"].tolist() == [[4.0, 5.0]]
    assert model.norm.running_mean.tolist() == [1.0, 2.0]


def test_a_slot_that_runs_the_network_needs_one():
    with pytest.raises(
        ConfigError, match=r"aggregator Watching runs the network.*server_model=ServerModel"
    ):
        FedAvg(aggregator=Watching())


def normed_clients() -> list[TensorBatches]:
    drawn = torch.Generator().manual_seed(0)
    return [
        TensorBatches(torch.randn(8, 2, generator=drawn) + 3, torch.randn(8, generator=drawn))
        for _ in range(2)
    ]


def test_an_aggregator_may_say_what_becomes_of_buffers():
    """Of the running means, which move by 1; the variances move by the clients' mean change."""
    buffers = ["norm.running_mean", "norm.running_var"]
    torch.manual_seed(0)
    first = {name: value.clone() for name, value in Normed().state_dict().items()}
    first.pop("norm.num_batches_tracked")
    runs = [
        federate(
            FedAvg(aggregator=aggregator, buffers=buffers, local_lr=0.05),
            normed_clients(),
            model=Normed,
            rounds=1,
            options=OPTIONS,
            initial=first,
        )[0]
        for aggregator in (Setting(), WeightedMean())
    ]
    assert runs[0]["norm.running_mean"].tolist() == [1.0, 1.0]
    assert runs[1]["norm.running_mean"].tolist() != [1.0, 1.0]
    for name in ("norm.running_var", "norm.weight", "head.weight"):
        assert torch.equal(runs[0][name], runs[1][name])


class Another:
    """An output of another network."""

    def __call__(self, params, update, stepped, replies):
        """Return one tensor that x does not have."""
        return {"answer": update["head.weight"] + 42.0}

    def build_model(self, tensors):
        """Return a layer that holds it."""
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.data.copy_(tensors["answer"])
        return layer


def test_another_network_is_given_out_alone_and_outlives_a_resume():
    assert isinstance(Another(), BuildsOutputModel)
    strategy = FedAvg(output=Another(), local_lr=0.05)
    output_model, _ = federate(
        strategy, clients(), model=lambda: Regression(2), rounds=1, options=OPTIONS
    )
    assert output_model.keys() == {"answer"}
    resumed = FedAvg(output=Another(), local_lr=0.05)
    resumed.restore(strategy.snapshot())
    again, _ = federate(resumed, clients(), model=lambda: Regression(2), rounds=1, options=OPTIONS)
    assert torch.equal(again["answer"], output_model["answer"])
    layer = resumed.server_model_of(again)
    assert torch.equal(layer.weight.double(), again["answer"].float().double())


def test_the_tasks_own_network_is_no_other():
    with pytest.raises(ValueError, match="the task's own network"):
        FedAvg().server_model_of({})


def test_clients_cannot_evaluate_another_network(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluation.clients=true.*AllClients.*set it to false"):
        run_recipe(tmp_path, *TINY, "strategy=ensemble", "evaluation.clients=true")


def task_of(*words: str):
    recipe = compose(overrides(*words))
    return build_task(
        plain_part(recipe, "task"), plain_part(recipe, "partition"), seed=0, num_clients=3
    )


def test_black_and_white_are_what_the_task_makes_of_them():
    """(0 - mean) / std and (1 - mean) / std, and what the task's own transform gives."""
    task = task_of("task=cifar10")
    found = server_model_of(task, nn.Linear(1, 1))
    assert (found.input_shape, found.num_classes) == ((3, 32, 32), 10)
    mean = torch.tensor([0.4914, 0.4822, 0.4465])
    std = torch.tensor([0.2023, 0.1994, 0.2010])
    torch.testing.assert_close(found.black, -mean / std)
    torch.testing.assert_close(found.white, (1 - mean) / std)


def test_a_text_is_neither_black_nor_white():
    found = server_model_of(task_of("task=imdb"), nn.Linear(1, 1))
    assert found.black is None
    assert found.white is None
    assert found.input_shape == (200,)
