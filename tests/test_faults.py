"""Faults that are quick to see, in a federation of processes; tests/faults.py has the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import faults
from tests.deployed import SECONDS, Deployment

DOCS = Path(__file__).parents[1] / "docs" / "deployment.md"


@pytest.mark.flower
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.0/8 on loopback")
def test_bad_replies_are_refused_and_a_restarted_site_goes_on_with_its_state(tmp_path):
    """What must be seen is asserted where it is done; the last line compares with no fault."""
    with Deployment(tmp_path / "federation") as federation:
        seen = faults.replies(faults.Scene(federation))
    assert federation.left() == []
    assert len(seen) == 5
    assert seen[-1].startswith("site 2 restarted: rounds 1 to 3 have the bits of one machine")


def test_every_fault_of_the_script_is_in_the_docs():
    text = DOCS.read_text(encoding="utf-8")
    assert [name for name in faults.FAULTS if f"`{name}`" not in text] == []
