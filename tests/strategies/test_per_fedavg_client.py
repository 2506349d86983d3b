"""Per-FedAvg's optimizer in a client, with phases, BatchNorm and SCAFFOLD, and its recipe."""

from __future__ import annotations

import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn import functional as F

from client_app.client import FederatedClient
from client_app.state import ContextStateStore
from conf import build_local_optimizer, compose
from strategies.components.local_training_config import LocalTrainingConfig, Phase
from strategies.components.tensor_selection import TensorSelector
from strategies.per_fedavg import PerFedAvg, PerFedAvgOptimizer
from strategies.scaffold import SCAFFOLD, ControlVariateClient
from tests.federation import Regression, TensorBatches, federate
from tests.recipes import overrides
from tests.strategies.sides import check_side
from tests.strategies.test_reductions import Classifier, blobs


def fit(model: nn.Module, data: TensorBatches, options: LocalTrainingConfig, **how) -> dict:
    client = FederatedClient(
        client_id=0,
        model=model,
        data=data,
        loss=F.cross_entropy,
        optimizer=PerFedAvgOptimizer(**how),
        options=options,
        store=ContextStateStore(RecordDict()),
    )
    return client.fit(client.get_parameters({}), {"round": 1, "lr": 0.1})[2]


@pytest.mark.parametrize(
    ("how", "steps"),
    [({}, 3), ({"order": "hessian_free"}, 2), ({"same_batch": True}, 6)],
)
def test_steps_are_counted_as_moves(how, steps):
    """17 examples in batches of 8, two epochs: six mini-batches."""
    metrics = fit(Classifier(), blobs(1)[0], LocalTrainingConfig(batch_size=8, epochs=2), **how)
    assert (metrics["num-steps"], metrics["lr-sum"]) == (steps, pytest.approx(0.1 * steps))


@pytest.mark.parametrize(("how", "passes"), [({}, 2), ({"order": "hessian_free"}, 4)])
def test_batchnorm_statistics_move_in_every_pass(how, passes):
    """Equal batches of mean 3: with momentum .1 the running mean is 3 (1 - .9^passes)."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.BatchNorm1d(4)
            self.head = nn.Linear(4, 3)

        def forward(self, inputs):
            features = self.body(inputs)
            return features, self.head(features)

    model = Normed()
    inputs = torch.tensor([[2.0] * 4, [4.0] * 4]).repeat(3, 1)
    data = TensorBatches(inputs, torch.tensor([0, 1] * 3), num_classes=3)
    data.batches = lambda *_, **__: iter([(inputs[:2], data.labels[:2])] * 3)
    fit(model, data, LocalTrainingConfig(batch_size=2, epochs=1), **how)
    expected = torch.full((4,), 3.0 * (1 - 0.9**passes))
    torch.testing.assert_close(model.body.running_mean, expected)


@pytest.mark.parametrize("order", ["first", "hessian_free"])
def test_what_a_phase_freezes_stays_where_it_is(order):
    model = Classifier()
    phases = (Phase(TensorSelector("head.*")),)
    fit(
        model, blobs(1)[0], LocalTrainingConfig(batch_size=4, phases=phases), order=order, alpha=0.1
    )
    start = Classifier().state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, start[name]) != name.startswith("head")


def test_the_strategy_is_fedavgs_server():
    params, reports = federate(
        PerFedAvg(local_lr=0.1),
        blobs(),
        model=Classifier,
        loss=F.cross_entropy,
        rounds=5,
        options=LocalTrainingConfig(batch_size=4, epochs=2),
        optimizer=PerFedAvgOptimizer,
    )
    assert reports[-1].metrics["train-loss"] < reports[1].metrics["train-loss"]
    assert params.keys() == Classifier().state_dict().keys()


def test_scaffolds_control_variate_is_the_mean_gradient_used():
    """x = (3, 4), target -10, w = 0: g = 10 x, w' = -.01 * 10 x, f's gradient there is 7.5 x."""
    optimizer = PerFedAvgOptimizer(alpha=0.01)
    check_side(ControlVariateClient(), Regression(2), optimizer)  # its moves are plain
    inputs = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(2, 1)
    store = ContextStateStore(RecordDict())
    strategy = SCAFFOLD(local_lr=0.1)
    params, _ = federate(
        strategy,
        [TensorBatches(inputs, torch.full((2,), -10.0, dtype=torch.float64))],
        model=lambda: Regression(2),
        rounds=1,
        options=LocalTrainingConfig(batch_size=1),
        optimizer=lambda: optimizer,
        stores={0: store},
    )
    kept = store.load(strategy.state.experiment, 1)["control_variate"]["head.weight"]
    torch.testing.assert_close(kept, torch.tensor([[22.5, 30.0]], dtype=torch.float64))
    torch.testing.assert_close(params["head.weight"], -0.1 * kept)


# ---- the recipe ----------------------------------------------------------------------------------


def test_the_recipes_solver():
    words = ["strategy=per_fedavg", "strategy.per_fedavg.alpha=0.2"]
    words += ["strategy.per_fedavg.order=hessian_free", "strategy.per_fedavg.same_batch=true"]
    optimizer = build_local_optimizer(compose(overrides(*words, "local=adam")), 1)
    assert isinstance(optimizer, PerFedAvgOptimizer)
    assert (optimizer.alpha, optimizer.order, optimizer.same_batch) == (0.2, "hessian_free", True)
    assert optimizer.stateful(["w"]) == []


@pytest.mark.parametrize("setting", ["momentum", "weight_decay"])
def test_what_its_plain_steps_lack_is_refused(setting):
    recipe = compose(overrides("strategy=per_fedavg", f"local.{setting}=0.5"))
    with pytest.raises(ValueError, match=rf"local\.{setting}=0\.5"):
        build_local_optimizer(recipe, 1)
