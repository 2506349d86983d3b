"""A client that loses its state restarts the states that are coupled to it; the run goes on."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from flwr.app import RecordDict

from client_app.state import ContextStateStore
from server_app.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from strategies.components.samplers import FixedSizeSampler
from strategies.fedavg import FedAvg
from strategies.feddyn import FedDyn
from strategies.fedpvr import FedPVR
from strategies.privacy.secure_aggregation import SecAggPlus
from strategies.scaffold import SCAFFOLD
from tests.federation import Regression, federate
from tests.strategies.test_closed_forms import STEPS, clients, distance

AFTER = 3  # the round after which the state is gone
RESTARTED = {"control_variate": AFTER + 1}


class Forgetful(ContextStateStore):
    """Loses all that it holds, once."""

    def __init__(self) -> None:
        super().__init__(RecordDict())
        self.whole = True

    def load(self, experiment, round):
        if round == AFTER and self.whole:
            self.whole = False
            return {}
        return super().load(experiment, round)


def stores(*losing: int):
    return {i: Forgetful() if i in losing else ContextStateStore(RecordDict()) for i in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("losing", [(0,), (1,), (0, 1)], ids=["one", "the_other", "both"])
@pytest.mark.parametrize("method", [SCAFFOLD, lambda **how: FedPVR("all", **how)])
def test_control_variates_still_lead_to_the_optimum(method, losing, tmp_path):
    """A lost c_i that stayed in c would keep the model .65 to .92 from it."""
    strategy = method(local_lr=0.05)
    assert distance(strategy, 60, stores=stores(*losing)) < 1e-9
    assert strategy.state.restarted == RESTARTED
    checkpoint = Checkpoint({"w": torch.zeros(2)}, strategy.snapshot(), "recipe")
    loaded = load_checkpoint(save_checkpoint(tmp_path, checkpoint), ["w"])
    assert loaded.state.restarted == RESTARTED


@pytest.mark.slow
def test_partial_participation_restarts_every_client_once_and_drift_sums_restart():
    strategy = SCAFFOLD(local_lr=0.04, sampler=FixedSizeSampler(0.5, seed=1))
    assert distance(strategy, 150, stores=stores(0, 1)) < 1e-9
    assert strategy.state.restarted
    assert distance(FedDyn(0.1, local_lr=0.05), 300, stores=stores(0)) < 2e-3


def test_a_secure_sum_reports_a_lost_state():
    strategy = SCAFFOLD(local_lr=0.05, secure_aggregation=SecAggPlus(max_examples=50))
    three = [*clients(), clients()[0]]
    kept = {**stores(1), 2: ContextStateStore(RecordDict())}
    model = partial(Regression, 2)
    federate(strategy, three, model=model, rounds=6, options=STEPS, stores=kept)
    assert strategy.state.restarted == RESTARTED


@pytest.mark.parametrize("method", [FedAvg, lambda **how: FedPVR("none", **how)])
def test_a_method_without_client_state_restarts_nothing(method):
    strategy = method(local_lr=0.05)
    distance(strategy, 6, stores=stores(0))
    assert strategy.state.restarted == {}
