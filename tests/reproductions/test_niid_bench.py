"""SCAFFOLD's control variate in NIID-Bench's code before August 2022."""

from functools import partial

import pytest
import torch
from flwr.app import RecordDict

from fedhet.client_app.state import ContextStateStore
from fedhet.reproductions.niid_bench.scaffold import SCAFFOLDOfSelected
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.scaffold import SCAFFOLD
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
