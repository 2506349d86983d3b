"""A training ends with a step on a few examples, and no round follows (docs/results/maecho.md)."""

import logging

import pytest

from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow

WORDS = [*TINY, "partition=iid", "local.epochs=1", "local.batch_size=33"]  # 200 = 6 * 33 + 2


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (["rounds=1"], True),
        (["rounds=2"], False),
        (["rounds=1", "local.drop_last=true"], False),
        (["rounds=1", "local.epochs=null", "local.steps=7"], False),
        (["rounds=1", "local.batch_size=32"], False),  # 200 = 6 * 32 + 8
        (["rounds=1", "local.batch_size=201"], False),  # the only batch
    ],
    ids=str,
)
def test_it_is_warned_of(words, warned, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "flwr"):
        run_recipe(tmp_path / "run", *WORDS, *words)
    expected = "(local.batch_size=33): 2 of client 0, 2 of client 1, 2 of client 2. Its step"
    assert (expected in caplog.text) == warned
    assert ("the last batch" in caplog.text) == warned
