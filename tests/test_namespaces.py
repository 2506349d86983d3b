"""docker/federation.yaml in network namespaces: a run with bad replies, and a stranger's tries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployed import MARKS, SITES, Deployment, Loopback
from tests.faults import replies
from tests.namespaces import Namespaces, Stranger, open_control, why_not
from tests.scene import Scene

PROBLEM = why_not()
pytestmark = MARKS
needs_namespaces = pytest.mark.skipif(PROBLEM is not None, reason=f"network namespaces: {PROBLEM}")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    network = Loopback if PROBLEM else Namespaces
    with Deployment(tmp_path_factory.mktemp("federation"), network) as deployment:
        yield deployment
    assert deployment.left() == []


@pytest.fixture(scope="module")
def stranger(federation, tmp_path_factory) -> Stranger:
    return Stranger(federation, tmp_path_factory.mktemp("stranger"))


def test_bad_replies_are_refused_and_a_restarted_site_keeps_its_state(federation):
    """The drill has the assertions; its last line compares with an undisturbed run."""
    seen = replies(Scene(federation))
    assert seen[-1].startswith("site 2 restarted: rounds 1 to 3 have the bits of one machine")


@needs_namespaces
def test_the_code_at_a_site_reaches_only_its_own_supernode(federation):
    network = federation.network
    program = """
import socket, sys
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        socket.create_connection((host, int(port)), 3)
    except OSError:
        continue
    print(host)
"""
    targets = {
        "10.77.9.9": "9092",  # nowhere
        network.address("network"): "9092",
        network.address("supernode-1", "site-1"): "9094",
        network.address("supernode-0"): "9094",
        "runtime": "9094",
    }
    words = [word for target in targets.items() for word in target]
    done = federation.execute("clientapp-0", "python", "-c", program, *words)
    assert done.stdout.split() == ["runtime"]


@needs_namespaces
def test_a_stranger_with_the_certificate_is_refused_everywhere(stranger, federation):
    assert stranger.open_ports(stranger.server) == [9092]
    assert stranger.open_ports(federation.network.address("supernode-0")) == []
    for port in (8000, 9092):
        assert set(stranger.uses_control(port).values()) == {"unavailable"}
    codes: dict[str, set[str]] = {}
    for method, code in stranger.status_by_method().items():
        codes.setdefault(method.partition("/")[0], set()).add(code)
    assert codes == {"Control": {"UNIMPLEMENTED"}, "Fleet": {"UNAUTHENTICATED"}}
    assert len(federation.nodes()) == len(SITES)
    assert stranger.marks() == 0


@needs_namespaces
def test_with_control_opened_the_same_tries_succeed(stranger, federation):
    """Last, since it admits the stranger: it shows that the test above can fail."""
    open_control(federation)
    assert stranger.open_ports(stranger.server) == [8000, 9092]
    assert set(stranger.uses_control(8000).values()) == {"exit code 0"}
    assert len(federation.nodes()) == len(SITES) + 1
    assert stranger.marks() == len(SITES)
