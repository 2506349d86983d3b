"""FedDyn: rounds by hand, its state after losses, what it combines with."""

import pytest
import torch
from flwr.app import Message

from fedhet.conf import compose
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.model_outputs import Latest
from fedhet.strategies.feddyn import DRIFT_SUM, FedDyn
from fedhet.strategies.wire.compression import Compression, Int4
from tests.federation import Regression, federate
from tests.recipes import overrides
from tests.refused import refused
from tests.strategies.round import test_round
from tests.strategies.sides import built
from tests.strategies.test_closed_forms import Listed, scalars, stores

WEIGHT = "head.weight"


def test_two_rounds_by_hand():
    """Alpha .5, eta_l .1, K = 2, x = 0; round 1 has both clients, round 2 only the second.

    Round 1: g = (-1, -8), y = (.1, .8); g + alpha (y - x) = (-.9 + .05, -4.8 + .4),
    y = (.185, 1.24); Delta = .7125, H = .7125: output .7125, x = 1.425.
    Round 2: alpha h = .62; g + .62 = -2.3 + .62, y = 1.593; g + .62 + .5 (y - x) =
    -1.628 + .62 + .084, y = 1.6854; Delta = .2604, H = .7125 + .2604 / 2 = .8427:
    output 1.6854, x = 2.5281.
    """
    for rounds, slots, expected in (
        (1, {}, 0.7125),
        (1, {"output": Latest()}, 1.425),
        (2, {}, 1.6854),
        (2, {"output": Latest()}, 2.5281),
    ):
        params, _ = federate(
            built(FedDyn, alpha=0.5, local_lr=0.1, sampler=Listed([0, 1], [1]), **slots),
            scalars(),
            model=lambda: Regression(1),
            rounds=rounds,
            options=LocalTrainingConfig(epochs=2),
        )
        assert float(params[WEIGHT]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("up", [None, Int4()], ids=["in full", "int4"])
def test_the_server_keeps_the_mean_of_all_clients(up):
    """H = (1 / N) sum_i h_i, in the versions that count, after absences and a lost reply.

    The four bits of an update are what both sides add up.
    """
    own = stores(3)
    sampler = Listed([0, 1], [0, 1, 2], [0, 2], [1])
    strategy = built(
        FedDyn, alpha=0.5, local_lr=0.1, sampler=sampler, compression=Compression(up=up)
    )

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
        (["strategy=feddyn", "server.lr=0.5"], "server.lr=0.5 server.lr=1"),
        (["strategy=[feddyn,fedexp]"], "aggregator"),
        (["strategy=feddyn", "strategy/aggregator=weighted_mean"], "strategy/aggregator"),
        (["strategy=feddyn", "strategy/server_optimizer=adam"], "strategy/server_optimizer"),
    ],
)
def test_what_it_cannot_be_combined_with(words, message):
    with refused(*message.split(), kind=ValueError):
        compose(overrides(*words))
