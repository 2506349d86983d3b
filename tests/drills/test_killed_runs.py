"""A run whose processes are all killed, twice, at random moments."""

import sys

import pytest

from tests.drills import killed_runs

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="a launch is forked"),
]


@pytest.mark.parametrize("name", killed_runs.RUNS)
def test_a_run_that_is_killed_twice_ends_alike(name, tmp_path):
    words = killed_runs.RUNS[name]
    assert len(killed_runs.run_with_kills(tmp_path, words, rounds=8, kills=2, seed=3)) == 2
