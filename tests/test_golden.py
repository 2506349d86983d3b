"""MA-Echo's golden case on MNIST, beside the log of the authors' own run (facts.md 1.9)."""

import os

import pytest
import torch

from fedhet.conf import compose, plain_part
from fedhet.strategies.round.client_snapshots import FILE, load_replies
from fedhet.tasks import build_task
from fedhet.tasks.evaluation import evaluate_model
from tests.recipes import overrides, run_recipe

WORDS = ["+experiment=maecho/golden", "checkpoint.client_models=true"]
LOG_OF_LOCAL_MODELS = [10.10, 18.91, 29.55, 21.13, 29.38]


@pytest.mark.flower  # half a minute: not for every commit
@pytest.mark.timeout(900)
@pytest.mark.skipif("FEDHET_DATA" not in os.environ, reason="FEDHET_DATA is not set: no MNIST here")
def test_the_golden_case_comes_out_as_the_authors_log_has_it(tmp_path):
    summary = run_recipe(tmp_path, *WORDS, clients=5)
    assert 100 * summary["accuracy"] >= 80
    recipe = compose(overrides(*WORDS))
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=int(recipe.seed), num_clients=5)
    model, test = task.build_model(0), task.test_data(torch.device("cpu"))
    params, replies = load_replies(tmp_path / FILE)
    found = []
    for reply in replies:
        model.load_state_dict({name: x + reply.update[name] for name, x in params.items()})
        accuracy = evaluate_model(model, test, task.loss)[1]
        assert accuracy is not None
        found.append(100 * accuracy)
    assert found == pytest.approx(LOG_OF_LOCAL_MODELS, abs=1.0)
