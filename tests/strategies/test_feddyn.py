"""FedDyn: rounds by hand, its state at the optimum and after losses, what it combines with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from flwr.app import Message

from conf import compose
from server_app.assembly import check_recipe
from strategies.base import Step
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.components.model_outputs import Latest
from strategies.feddyn import DRIFT_SUM, FedDyn, FedDynClient
from tests.federation import Regression, federate
from tests.recipes import overrides
from tests.strategies.round import test_round
from tests.strategies.test_closed_forms import (
    STEPS,
    Listed,
    clients,
    gradient,
    optimum,
    scalars,
    stores,
)

WEIGHT = "head.weight"


def test_the_penalty_by_hand():
    """alpha .4, x = 0, y = (1; 2), h = (3; -1): .2 (1 + 4) + .4 (3 - 2) = 1.4.

    Gradient .4 (y + h) = (1.6; .4). An un-squared norm (PFLlib) has .2 y / sqrt(5) + .4 h, no
    quadratic term (FL-bench) .4 h.
    """
    params = {n: torch.tensor([v]).requires_grad_() for n, v in (("w", 1.0), ("v", 2.0))}
    context = SimpleNamespace(
        anchor={"w": torch.zeros(1), "v": torch.zeros(1)},
        state={DRIFT_SUM: {"w": torch.tensor([3.0]), "v": torch.tensor([-1.0])}},
    )
    value = FedDynClient(0.4).penalty(Step(params, None, None, None, None, context))
    assert value.item() == pytest.approx(1.4)
    value.backward()
    assert [p.grad.item() for p in params.values()] == pytest.approx([1.6, 0.4])


def test_two_rounds_by_hand():
    """Alpha 1, eta_l .1, K = 2, x = 0; round 1 has both clients, round 2 only the second.

    Round 1: g = (-1, -8), y = (.1, .8); g + (y - x) = (-.9 + .1, -4.8 + .8), y = (.18, 1.2);
    Delta = .69, H = .69: output .69, x = 1.38.
    Round 2: h = 1.2; g + h = -2.48 + 1.2, y = 1.508; g + h + (y - x) = -1.968 + 1.2 + .128,
    y = 1.572; Delta = .192, H = .69 + .192 / 2 = .786: output 1.572, x = 2.358.
    """
    for rounds, slots, expected in (
        (1, {}, 0.69),
        (1, {"output": Latest()}, 1.38),
        (2, {}, 1.572),
        (2, {"output": Latest()}, 2.358),
    ):
        params, _ = federate(
            FedDyn(1.0, local_lr=0.1, sampler=Listed([0, 1], [1]), **slots),
            scalars(),
            model=lambda: Regression(1),
            rounds=rounds,
            options=LocalTrainingConfig(epochs=2),
        )
        assert float(params[WEIGHT]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.slow
def test_what_is_kept_at_the_optimum():
    """-alpha h_i is the gradient of client i's objective there, and H, their mean, zero."""
    datasets, alpha, kept = clients(), 1.5, stores()
    strategy = FedDyn(alpha, local_lr=0.1)
    how = {"model": lambda: Regression(2), "rounds": 50, "options": STEPS, "stores": kept}
    federate(strategy, datasets, **how)
    for i, data in enumerate(datasets):
        own = kept[i].load(strategy.state.experiment, 50)[DRIFT_SUM][WEIGHT][0]
        expected = gradient(data, optimum(datasets))
        torch.testing.assert_close(-alpha * own, expected, atol=1e-8, rtol=0)
    mean = strategy.server_step.optimizer.drift_sum[WEIGHT]
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-8, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2])
def test_minus_alpha_h_is_the_gradient_where_training_reaches_the_minimum(rounds):
    """One client that minimises its objective: y is the output; also in later rounds."""
    (data, _), alpha, kept = clients(), 2.0, stores(1)
    strategy = FedDyn(alpha, local_lr=0.2)
    options = LocalTrainingConfig(batch_size=100, epochs=300)
    how = {"model": lambda: Regression(2), "rounds": rounds, "options": options, "stores": kept}
    params, _ = federate(strategy, [data], **how)
    expected = gradient(data, params[WEIGHT][0])
    own = kept[0].load(strategy.state.experiment, rounds)[DRIFT_SUM][WEIGHT][0]
    assert expected.norm() > 0.01
    torch.testing.assert_close(-alpha * own, expected, atol=1e-9, rtol=0)


def test_the_server_keeps_the_mean_of_all_clients():
    """H = (1 / N) sum_i h_i, in the versions that count, after absences and a lost reply."""
    own = stores(3)
    strategy = FedDyn(0.5, local_lr=0.1, sampler=Listed([0, 1], [0, 1, 2], [0, 2], [1]))

    def tamper(reply: Message) -> Message | None:
        lost = test_round.from_client(reply, 1) and strategy.state.round == 1
        return None if lost else reply

    test_round.run(strategy, rounds=5, tamper=tamper, stores=own)
    assert strategy.state.committed == {0: 5, 1: 5, 2: 5}
    kept = [own[i].load(strategy.state.experiment, 5)[DRIFT_SUM] for i in range(3)]
    mean = torch.stack([drift_sum[WEIGHT] for drift_sum in kept]).mean(0)
    assert mean.norm() > 0.01
    torch.testing.assert_close(strategy.server_step.optimizer.drift_sum[WEIGHT], mean)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["strategy=feddyn", "server.lr=0.5"], r"server\.lr=0\.5, .*feddyn needs server\.lr=1"),
        (["strategy=[feddyn,fedadam]"], "both replace the server_optimizer"),
        (["strategy=[feddyn,fedexp]"], "both replace the aggregator"),
        (["strategy=feddyn", "strategy/aggregator=weighted_mean"], r"aggregator.*UniformMean"),
        (["strategy=feddyn", "strategy/server_optimizer=adam"], r"optimizer.*FedDynServer"),
    ],
)
def test_what_it_cannot_be_combined_with(words, message):
    with pytest.raises(ValueError, match=message):
        check_recipe(compose(overrides(*words)))
