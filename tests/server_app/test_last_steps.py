"""Clients that take a step on a few examples (docs/results/niid_bench.md)."""

import logging

import pytest

from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.slow

WORDS = [*TINY, "rounds=1", "partition=iid", "local.epochs=1", "local.batch_size=66"]


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ([], True),  # 200 = 3 * 66 + 2
        (["rounds=2"], True),
        (["local.drop_last=true"], False),
        (["local.epochs=null", "local.steps=4"], True),
        (["local.epochs=null", "local.steps=3"], False),
        (["local.batch_size=65"], False),  # 200 = 3 * 65 + 5
        (["local.batch_size=201"], False),  # the only batch
    ],
    ids=str,
)
def test_it_is_warned_of(words, warned, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "flwr"):
        run_recipe(tmp_path / "run", *WORDS, *words)
    expected = "(local.batch_size=66): 2 of client 0, 2 of client 1, 2 of client 2. Its step"
    assert (expected in caplog.text) == warned
    assert ("the last batch" in caplog.text) == warned
