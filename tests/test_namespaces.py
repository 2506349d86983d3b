"""docker/federation.yaml in network namespaces, and what a stranger on the server's net gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deployed import RECIPE, SECONDS, Deployment
from tests.namespaces import MARK, Namespaces, Stranger, why_not
from tests.stranger.theirs import MARK as THEIR_MARK
from tests.test_deployment import alone

PROBLEM = why_not()
pytestmark = [
    pytest.mark.flower,
    pytest.mark.timeout(SECONDS + 300),
    pytest.mark.skipif(PROBLEM is not None, reason=f"network namespaces: {PROBLEM}"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("federation"), Namespaces) as deployment:
        yield deployment
    assert deployment.left() == []


@pytest.fixture(scope="module")
def stranger(federation, tmp_path_factory) -> Stranger:
    assert MARK == THEIR_MARK
    return Stranger(federation, tmp_path_factory.mktemp("stranger"))


def test_a_run_gives_the_bits_of_one_machine_alone(federation, tmp_path):
    words = ["strategy=fedpvr", "rounds=1"]
    summary = federation.submit([*RECIPE, *words], "fedpvr")
    assert summary["status"] == "completed", summary
    assert summary["failures"] == 0
    expected = alone(tmp_path / "alone", *words)
    assert summary["parameters_sha256"] == expected["parameters_sha256"]
    assert summary["accuracy"] == expected["accuracy"]


def test_a_sites_code_cannot_call_out(federation):
    """Neither the server nor another site: only its own SuperNode's Runtime."""
    network = federation.network
    targets = {
        "10.77.9.9": 9092,  # nowhere
        network.address("network", "default"): 9092,
        network.address("supernode-1", "site-1"): 9094,
        network.address("supernode-0", "default"): 9094,
    }
    program = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
    for host, port in targets.items():
        done = federation.execute("clientapp-0", "python", "-c", program, host, str(port))
        assert done.returncode == 1, f"{host}:{port}"
    done = federation.execute("clientapp-0", "python", "-c", program, "runtime", "9094")
    assert done.returncode == 0, done.stdout


def test_a_stranger_with_the_certificate_gets_nowhere(stranger):
    found = stranger.with_control_closed()
    assert [one for one in found if not one.right] == []
    assert len(found) == 12


def test_with_control_opened_the_stranger_gets_in(stranger):
    """Last, as it lets them in: the test above is able to fail."""
    found = stranger.with_control_open()
    assert [one for one in found if not one.right] == []
