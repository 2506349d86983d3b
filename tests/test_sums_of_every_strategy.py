"""Every recipe in a SecAgg+ round: it equals the plain round up to quantisation, or is refused.

Which it is follows from what the parts declare; here it is looked at from outside, a line each.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from common.errors import ConfigError
from common.results import read_rows
from conf import build_part, compose
from server_app.checkpoint import checkpoints
from strategies.privacy.reply_vector import require_sums
from strategies.privacy.secure_aggregation import SecAggPlus
from tests.recipes import TINY, overrides, run_recipe
from tests.test_every_strategy import WORDS, name_of

ONE_ROUND = [
    *TINY,
    "rounds=1",
    "task.train_size=150",
    "task.test_size=20",
]
MAX_EXAMPLES = 150
SECURE = [
    "strategy/secure_aggregation=secagg_plus",
    f"strategy.secure_aggregation.max_examples={MAX_EXAMPLES}",
]
ONE_BY_ONE = "one by one"
REFUSED = {  # by a word of the recipe, what the refusal says
    "norm_mean": "needs the norm of every update.*uniform_mean",
    "fedmrur": "needs the norm of every update",
    "fedexp": "needs the squared norm of every update",
    "fednova": "divides every client's update by the steps behind it",
    "strategy=average": "class_counts is read client by client",
    "maecho": "projections is read client by client",
    "regmean": "projections is read client by client",
    "alignment": ONE_BY_ONE,
    "otfusion": "class_counts is read client by client",
    "pfnm": "NeuralMatching: .*one by one",
    "fedma": "MatchedAveraging: .*one by one",
    "ensemble": "AllClients: .*one by one",
    "dense": "Distilled: .*one by one",
    "fedproto": "prototype_sums.*no shape",
    "centralised": "clients=1",
}


def refusal_of(words: list[str]) -> str | None:
    text = " ".join(words)
    return next((reason for word, reason in REFUSED.items() if word in text), None)


SUMMED = [words for words in WORDS if refusal_of(words) is None]
AT_THE_START = ("fedproto", "centralised")  # what the federation itself shows
KNOWN_AT_ONCE = [
    words
    for words in WORDS
    if refusal_of(words) and not any(word in words[0] for word in AT_THE_START)
]


def require(words: list[str]) -> None:
    """Ask the recipe's parts, without a run."""
    recipe = compose(overrides(*TINY, *words))
    parts = {
        key: build_part(recipe, f"strategy.{key}", 1)
        for key in ("client_sides", "server_sides", "aggregator", "transforms", "output")
    }
    transforms = list(parts.pop("transforms").values())
    require_sums("strategy/secure_aggregation", **parts, transforms=transforms, summed=True)


@pytest.mark.slow
def test_the_parts_of_every_recipe_say_whether_sums_do():
    """No list decides this but the tests' own: here it is held against what the parts say."""
    for words in KNOWN_AT_ONCE:
        with pytest.raises(ConfigError, match=refusal_of(words)):
            require(words)
    assert len(SUMMED) > 35
    for words in SUMMED:
        require(words)


@pytest.mark.flower  # a run or two of every recipe
@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_a_secure_round_equals_the_plain_one_or_is_refused(words, tmp_path):
    own = [word for word in words if word != "participation=0.7"]  # three are needed
    if reason := refusal_of(words):
        with pytest.raises(ConfigError, match=reason):
            run_recipe(tmp_path / "summed", *ONE_ROUND, *own, *SECURE)
        return
    found = []
    for name, more in (("plain", []), ("summed", SECURE)):
        folder = tmp_path / name
        summary = run_recipe(folder, *ONE_ROUND, *own, *more)
        assert (summary["status"], summary["failures"]) == ("completed", 0)
        tensors = load_file(checkpoints(folder / "checkpoints")[-1])
        found.append((tensors, read_rows(folder / "metrics.jsonl")[-1]))
    (plain, expected), (summed, row) = found
    # of x a step over the mean weight; adaptive server optimisers divide by tau and multiply by lr
    step = SecAggPlus().step(3) * MAX_EXAMPLES / (150 / 3)
    gain = 40.0 if any(word in words[0] for word in ("adagrad", "adam", "yogi")) else 2.0
    assert summed.keys() == plain.keys()
    for name, value in plain.items():
        # of what is kept beside: sums over step sizes of .4, and means of soft labels by class
        atol = gain * step if name.startswith("params/") else 2e-4
        torch.testing.assert_close(summed[name], value, rtol=1e-5, atol=atol, msg=name)
    for metric in ("train_loss", "received_loss", "received_accuracy", "num_examples"):
        assert row.get(metric) == pytest.approx(expected.get(metric), abs=1e-4), metric
    if "personal_accuracy" in expected:
        assert row["personal_accuracy"] == pytest.approx(expected["personal_accuracy"], abs=1e-4)
    assert "norm_ratio" not in row
