"""Runs under secure aggregation and differential privacy: whose scores the server has."""

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message
from torch import nn

from fedhet.common.results import read_rows
from tests.recipes import TINY, run_recipe
from tests.refused import refused

pytestmark = pytest.mark.slow
HERE = "tests.server_app.test_private_scores"
LOCAL = "strategy/differential_privacy=local"
CENTRAL = ["strategy/aggregator=uniform_mean", "strategy/differential_privacy=central_fixed"]
SECURE = "strategy/secure_aggregation=secagg_plus"


def site(client_id: int, seed: int):
    """Return the examples of a client; the server has none."""
    inputs = np.random.default_rng(client_id).normal(size=(40, 6)).astype(np.float32)
    return (inputs, (inputs[:, 0] > 0).astype(np.int64)), None


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


OWN = ["task=own", f"task.data={HERE}:site", "task.num_classes=2", "clients=3", "rounds=2"]
OWN += [f"task.model={HERE}:plain", "local.epochs=1"]


def rows_of(folder: Path, *words: str, **how) -> list[dict]:
    run_recipe(folder, *words, **how)
    return read_rows(folder / "metrics.jsonl")


@pytest.mark.parametrize("private", [LOCAL, SECURE])
def test_no_client_is_asked_for_scores_because_the_server_has_no_examples(private, tmp_path):
    assert "client_accuracy" in rows_of(tmp_path / "plain", *OWN)[-1]
    kinds = set()

    def listen(reply: Message) -> Message:
        kinds.add(reply.metadata.message_type)
        return reply

    last = rows_of(tmp_path / "private", *OWN, private, tamper=listen)[-1]
    assert (last["round"], "evaluate" in kinds) == (2, False)
    assert not {"client_accuracy", "client_loss", "accuracy"} & last.keys()


def test_own_models_under_a_secure_sum_have_the_mean_of_the_rounds_clients(tmp_path):
    """Not of those that trained before: the server does not know whose score is whose."""
    words = [*TINY, "strategy=fedper", "clients=6", "participation=0.5", "rounds=3"]
    words += ["local.epochs=1", "task.train_size=300", "task.test_size=60"]
    scores: list[float] = []

    def listen(reply: Message) -> Message:
        found = dict(reply.content.metric_records.get("metrics", {}))
        scores.extend(v for name, v in found.items() if name == "personal-test-accuracy")
        return reply

    rows_of(tmp_path / "plain", *words, clients=6, tamper=listen)
    secure = rows_of(tmp_path / "secure", *words, SECURE, clients=6)
    means = [np.mean(scores[3 * round : 3 * round + 3]) for round in range(3)]
    assert [row["accuracy"] for row in secure[1:]] == pytest.approx(means, abs=0.006)
    assert abs(means[-1] - np.mean(scores)) > 0.015  # the mean over all rounds is another


def test_statistics_that_travel_are_refused_and_those_that_stay_are_not(tmp_path):
    words = [*OWN, f"task.model={HERE}:normed", "local.drop_last=true"]
    for number, private in enumerate((CENTRAL, [LOCAL])):
        with refused("body.1.running_mean"):
            run_recipe(tmp_path / str(number), *words, *private)
        stays = [*words, *private, "strategy.personal='body.1.*'"]
        rows = rows_of(tmp_path / f"stays {number}", *stays)
        assert rows[-1]["dp_epsilon"] > 0.0


@pytest.mark.parametrize(
    "method", ["average", "ensemble", "otfusion", "pfnm", "fedma", "maecho", "regmean", "fednova"]
)
def test_payloads_that_no_noise_leaves_valid_are_refused_before_round_1(method, tmp_path):
    with refused("strategy/differential_privacy=local"):
        run_recipe(tmp_path, *TINY, f"strategy={method}", "rounds=1", LOCAL)


@pytest.mark.parametrize("model", ["clients", "both"])
def test_scores_of_own_models_are_refused_where_no_client_sends_any(model, tmp_path):
    with refused(f"evaluation.model={model}"):
        run_recipe(tmp_path, *TINY, f"evaluation.model={model}", LOCAL)


def test_figures_of_single_clients_are_not_those_of_copies_of_the_mean(tmp_path):
    words = [*TINY, "strategy=fedcm", "local.epochs=1"]
    last = rows_of(tmp_path / "plain", *words)[-1]
    private = rows_of(tmp_path / "secure", *words, SECURE)[-1]
    assert last["gradient_reach"] > last["step_norm"] > 0.0
    assert "gradient_reach" not in private
    assert private["effective_step"] == pytest.approx(last["effective_step"], rel=1e-3)
