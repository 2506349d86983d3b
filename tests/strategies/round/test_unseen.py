"""partition.unseen: clients that are evaluated, and never trained on."""

import pytest

from fedhet.common.results import read_rows
from fedhet.conf import compose
from fedhet.strategies.round.registration import FederationConfig
from tests.recipes import TINY, overrides, run_recipe
from tests.refused import refused

SYSTEM = ["strategy=fedbuff", "system=lognormal", "strategy.asynchronous.buffer=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], ["strategy/sampler=bernoulli", "participation=0.5"], ["system=lognormal"], SYSTEM],
    ids=["all", "bernoulli", "system", "asynchronous"],
)
def test_an_unseen_client_is_evaluated_and_never_trains(words, tmp_path):
    words = ["rounds=3", "partition.unseen=[1]", "evaluation.clients=true", *words]
    words = [word for word in words if SYSTEM[0] not in words or not word.startswith("evaluation.")]
    run_recipe(tmp_path, *TINY, *words, "evaluation.per_client=true")
    rows = read_rows(tmp_path / "metrics.jsonl")
    trained = {client for row in rows for client in row.get("clients", ())}
    assert trained == {0, 2}
    if "evaluation.clients=true" in words:
        assert set(rows[-1]["per_client"]["client_loss"]) == {"0", "1", "2"}


@pytest.mark.parametrize(
    "words",
    [
        ["partition.unseen=[3]", "clients=3"],
        ["partition.unseen=[0,1,2]", "clients=3"],
        ["partition.unseen=[0]", "strategy/differential_privacy=central_fixed"],
    ],
)
def test_clients_that_cannot_be_unseen_are_refused(words):
    with refused("partition.unseen"):
        compose(overrides("task=digits", *words))


def test_of_registered_clients_at_least_one_trains():
    assert FederationConfig(unseen=frozenset({1})).num_trainers(3) == 2
    for unseen in ({0, 1}, {2}):
        with refused("partition.unseen"):
            FederationConfig(unseen=frozenset(unseen)).num_trainers(2)
