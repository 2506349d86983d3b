"""SCAFFOLD in NIID-Bench's setting: its control variate before August 2022, rounds that fall."""

import json
from functools import partial

import pytest
import torch
from flwr.app import RecordDict

from fedhet.client_app.state import ContextStateStore
from fedhet.reproductions.niid_bench.falls import falls
from fedhet.reproductions.niid_bench.scaffold import SCAFFOLDOfSelected
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.scaffold import SCAFFOLD
from tests.docs.stored import PAGES
from tests.federation import Regression, TensorBatches, federate
from tests.strategies.sides import built

SIZE, CLIENTS = 5, 6


@pytest.mark.parametrize(("method", "length"), [(SCAFFOLD, 1.0), (SCAFFOLDOfSelected, 3.0)])
def test_c_is_that_many_times_the_mean_of_all_c_i_where_a_third_of_the_clients_train(
    method, length
):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(CLIENTS, 8, SIZE + 1, generator=generator, dtype=torch.float64)
    data = [TensorBatches(part[:, :SIZE], part[:, SIZE]) for part in rows]
    stores = {i: ContextStateStore(RecordDict()) for i in range(CLIENTS)}
    strategy = built(method, local_lr=0.05, sampler=FixedSizeSampler(participation=1 / 3))
    federate(strategy, data, model=partial(Regression, SIZE), rounds=9, stores=stores)
    run = strategy.state
    states = [stores[i].load(run.experiment, run.committed[i]) for i in sorted(run.committed)]
    own = sum(state["control_variate"]["head.weight"] for state in states) / CLIENTS
    found = strategy.server_sides[method.name].control_variate["head.weight"]
    assert len(states) > 2
    torch.testing.assert_close(found, length * own, rtol=1e-12, atol=0)


def test_a_round_falls_if_it_is_five_points_under_the_median_around_it():
    accuracy = [0.5] * 120
    accuracy[109], accuracy[110], accuracy[115], accuracy[60] = 0.44, 0.46, 0.4, 0.1
    clients = [[0]] * 109 + [[0, 1]] * 2 + [[2]] * 9
    assert falls(accuracy, clients, sizes=[64, 130, 67]) == [
        {"small": True, "rounds": 2, "fell": 1},
        {"small": False, "rounds": 12, "fell": 1},
    ]


def test_the_stored_falls_are_those_of_the_stored_rounds():
    for run in json.loads((PAGES / "niid_bench_falls.json").read_text(encoding="utf-8"))["runs"]:
        assert run["falls"] == falls(run["accuracy"], run["clients"], run["sizes"])
