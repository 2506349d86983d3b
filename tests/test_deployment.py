"""docker/federation.yaml as processes: SuperLink, executors and three SuperNodes, TLS, node keys.

What the compose file would start is started (tests/deployed.py), and gives what one machine alone
gives: the same bits.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.deployed import MARKS, RECIPE, SECONDS, SITES, Deployment, Loopback
from tests.stranger.probe import status_by_method

pytestmark = MARKS
WORDS = ["strategy=[feddw,fedpvr]", "partition.holdout=0.2", "calibration.alphas=[0.1]"]


@pytest.fixture(scope="module")
def fleet(federation) -> tuple[str, int]:
    """Return the address that sites call."""
    assert isinstance(federation.network, Loopback)
    return federation.network.address("network"), 9092


def authority(federation: Deployment) -> Path:
    return federation.folder / "server" / "keys" / "ca.crt"


# ---- runs ----------------------------------------------------------------------------------------


def alone(folder: Path, *words: str) -> dict:
    """Return the summary of `fedhet runtime=local` with the recipe."""
    command = [sys.executable, "-m", "fedhet.launch", *RECIPE, *words, "runtime=local"]
    done = subprocess.run(
        [*command, f"results_dir={folder}"],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "summary.json").read_text())


def test_a_run_gives_the_bits_of_one_machine_alone(federation, tmp_path):
    """Payloads both ways, statistics, what stays at a site, and calibration after the end."""
    summary = federation.submit([*RECIPE, *WORDS], "run")
    assert (summary["status"], summary["strategy"]) == ("completed", "feddw+fedpvr"), summary
    assert summary["failures"] == 0
    expected = alone(tmp_path / "alone", *WORDS)
    assert summary["parameters_sha256"] == expected["parameters_sha256"]
    assert summary["accuracy"] == expected["accuracy"] > 0.3
    assert summary["bytes_up"] == expected["bytes_up"]
    assert summary["prediction_sets"] == expected["prediction_sets"]


def test_control_variates_lie_at_their_sites(federation):
    """After that run: SCAFFOLD's part of FedPVR."""
    for site in SITES:
        state = federation.folder / f"site-{site}" / "state" / "clients"
        assert list(state.glob(f"*/client-{site:05}/round-000002.safetensors"))
        assert not list(state.glob(f"*/client-0000[!{site}]"))
    assert not list(federation.folder.glob("server/results/*/client_state"))


def test_every_container_is_well(federation):
    for name, service in federation.services.items():
        if service.health:
            assert federation.is_healthy(name), name


def test_a_key_is_registered_once(federation):
    before = federation.nodes()
    assert federation.run("register").stdout.count("is registered already") == len(SITES)
    assert [node["node-id"] for node in before] == [n["node-id"] for n in federation.nodes()]
    assert len(before) == len(SITES)


# ---- strangers -----------------------------------------------------------------------------------


def supernode(federation: Deployment, folder: Path, *changes: tuple[str, str]) -> tuple[int, str]:
    """Run supernode-0's command with words replaced; return its exit code and what it said.

    Args:
        federation: the one that it calls.
        folder: is /stranger to it.
        changes: words of the compose file, each with the words that take its place.
    """
    service = federation.services["supernode-0"]
    service = replace(service, mounts={**service.mounts, "/stranger": folder})
    words = [*service.words, "--max-retries=1"]
    for old, new in (*changes, ("--port=9094", "--port=9194")):
        assert old in words
        words[words.index(old) : words.index(old) + 1] = new.split()
    done = federation.execute_as(service, *words)
    return done.returncode, done.stdout


CA = "--root-certificates=/run/secrets/ca.crt"
KEY = "--auth-supernode-private-key=/run/secrets/node.key"


def test_an_unregistered_key_is_refused(federation, tmp_path):
    federation.make_site(tmp_path, "stranger")
    new = "--auth-supernode-private-key=/stranger/site/keys/node.key"
    code, said = supernode(federation, tmp_path, (KEY, new))
    assert code == 1
    assert "[code: 2004] Failed to activate SuperNode" in said


def test_no_key_is_refused(federation, tmp_path):
    code, said = supernode(federation, tmp_path, (KEY, ""))
    assert code == 1
    assert "[code: 2001] SuperNode authentication is enabled" in said


def test_the_key_of_a_node_that_is_there_is_refused(federation, tmp_path):
    code, said = supernode(federation, tmp_path)
    assert code == 1
    assert "[code: 2004] Failed to activate SuperNode" in said


def test_another_servers_ca_is_refused_by_the_node(federation, tmp_path):
    federation.make_authority(tmp_path)
    new = "--root-certificates=/stranger/server/keys/ca.crt"
    code, said = supernode(federation, tmp_path, (CA, new))
    assert code == 1
    assert "CERTIFICATE_VERIFY_FAILED" in said


def test_plain_text_is_refused(federation, tmp_path):
    code, said = supernode(federation, tmp_path, (CA, "--insecure"), (KEY, ""))
    assert code == 1
    assert "Socket closed" in said


def test_none_of_them_has_become_a_node(federation):
    assert len(federation.nodes()) == len(SITES)
    assert {node["status"] for node in federation.nodes()} == {"online"}


# ---- the one port --------------------------------------------------------------------------------


def connect(federation, fleet, *protocols: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=authority(federation))
    context.set_alpn_protocols(list(protocols))
    plain = socket.create_connection(fleet, timeout=20)
    return context.wrap_socket(plain, server_hostname=fleet[0])


def talk_http1(connected: socket.socket) -> None:
    client = http.client.HTTPConnection("server")
    client.sock = connected
    client.request("GET", "/health")
    client.getresponse()


NO_ANSWER = (OSError, http.client.HTTPException)


def test_the_port_speaks_http2_over_tls(federation, fleet):
    with connect(federation, fleet, "http/1.1", "h2") as secure:
        assert secure.version() == "TLSv1.3"
        assert secure.selected_alpn_protocol() == "h2"


def test_the_port_does_not_speak_http1(federation, fleet):
    with connect(federation, fleet, "http/1.1") as secure:
        assert secure.selected_alpn_protocol() is None
        with pytest.raises(NO_ANSWER):
            talk_http1(secure)


def test_the_port_does_not_speak_plain_text(fleet):
    with socket.create_connection(fleet, timeout=20) as plain, pytest.raises(NO_ANSWER):
        talk_http1(plain)


def test_control_speaks_http1(federation, fleet):
    """So that the tests above can fail: the same questions to a port that does."""
    with connect(federation, (fleet[0], 8000), "http/1.1", "h2") as secure:
        assert secure.selected_alpn_protocol() is None
        talk_http1(secure)


def test_the_port_has_fleet_for_registered_keys_and_no_control(federation, fleet):
    """Every method of both, called by somebody who has the CA's certificate and no key."""
    answers = status_by_method("{}:{}".format(*fleet), str(authority(federation)))
    for service, wanted, some in (
        ("Control", "UNIMPLEMENTED", {"RegisterNode", "ListNodes", "StartRun", "StreamLogs"}),
        ("Fleet", "UNAUTHENTICATED", {"RegisterNode", "ActivateNode", "PullMessages", "GetFab"}),
    ):
        codes = {
            name.partition("/")[2]: code
            for name, code in answers.items()
            if name.startswith(f"{service}/")
        }
        assert some <= codes.keys()
        assert set(codes.values()) == {wanted}, codes
