"""docker/federation.yaml as processes: TLS, node keys, three sites, `fedhet runtime=deployment`.

tests/deployed.py starts the services of the compose file.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import ssl
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from common.results import read_rows
from common.run_events import RECORD_FILE
from strategies.round.tensor_files import parameters_sha256
from tests.deployed import MARKS, RECIPE, SITES, Deployment
from tests.namespaces import make_keys
from tests.processes import finish, read_until, start, summary_of
from tests.stranger.probe import status_by_method
from tests.tunnel import Tunnel

pytestmark = MARKS
# Payloads both ways, statistics, state at the sites, calibration after the last round.
WORDS = ["strategy=[feddw,fedpvr]", "partition.holdout=0.2", "calibration.alphas=[0.1]"]
SAME = ("parameters_sha256", "accuracy", "bytes_up", "bytes_down", "prediction_sets", "failures")


@pytest.fixture(scope="module")
def fleet(federation: Deployment) -> tuple[str, int]:
    """Return the address that sites call."""
    return federation.network.address("network"), 9092


@pytest.fixture(scope="module")
def ca(federation: Deployment) -> Path:
    return federation.folder / "server" / "keys" / "ca.crt"


def launch(folder: Path, *words: str) -> subprocess.Popen[str]:
    return start(folder.parent, *RECIPE, *words, f"results_dir={folder}")


def status(federation: Deployment, folder: Path) -> str:
    return federation.run_status(json.loads((folder / RECORD_FILE).read_text())["run_id"])[0]


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_survives_a_broken_tunnel_and_ctrl_c_and_is_followed_again(
    federation, fleet, ca, tmp_path
):
    """The server writes to a folder of its own, from which everything is fetched."""
    here, there, alone = tmp_path / "here", tmp_path / "there", tmp_path / "alone"
    with Tunnel((fleet[0], 8000)) as tunnel:
        words = [
            *WORDS,
            "runtime=deployment",
            f"runtime.address=127.0.0.1:{tunnel.port}",
            f"runtime.root_certificates={ca}",
            f"runtime.server_results={there}",
            "runtime.fetch='cp -R {server}/. {here}'",
        ]
        launched = launch(here, *words)
        said = read_until(launched, "round   0/2")
        tunnel.cut()
        time.sleep(3)
        tunnel.mend()
        said += read_until(launched, "round   1/2")
        launched.send_signal(signal.SIGINT)
        code, rest = finish(launched)
        assert code == 130, said + rest
        assert "continues. Follow it again" in rest
        assert (said + rest).count("round   0/2") == 1
        run_id = json.loads((here / RECORD_FILE).read_text())["run_id"]
        assert status(federation, here) in ("running", "finished:completed")
        code, said = finish(launch(here, *words, "resume=true"))
    assert code == 0, said + federation.said()
    assert "round   2/2" in said
    assert json.loads((here / RECORD_FILE).read_text())["run_id"] == run_id
    code, output = finish(launch(alone, *WORDS, "runtime=local"))
    assert code == 0, output
    found, expected = summary_of(here), summary_of(alone)
    assert found["strategy"] == "feddw+fedpvr"
    assert {key: found[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert found["accuracy"] > 0.3
    stored = load_file(here / "model.safetensors")
    assert parameters_sha256(stored) == expected["parameters_sha256"]
    assert (here / "checkpoints" / "round-000002.safetensors").exists()
    [server] = there.iterdir()
    assert read_rows(here / "metrics.jsonl") == read_rows(server / "metrics.jsonl")
    log = (here / "log.txt").read_text()
    assert "fedhet-event" not in log
    assert log.count("Registered 3 clients with") == 1
    for site in SITES:  # FedPVR's control variates lie at their sites
        state = federation.folder / f"site-{site}" / "state" / "clients"
        assert list(state.glob(f"*/client-{site:05}/round-000002.safetensors"))
        assert not list(state.glob(f"*/client-0000[!{site}]"))
    assert not (server / "client_state").exists()


def test_a_run_that_ctrl_c_stops_is_resumed_from_its_checkpoint(federation, fleet, ca, tmp_path):
    """The server writes to a folder of its own, and nothing is fetched."""
    folder, there, alone = tmp_path / "run", tmp_path / "there", tmp_path / "alone"
    words = ["strategy=fedpvr", "runtime=deployment", f"runtime.address={fleet[0]}:8000"]
    words += [f"runtime.root_certificates={ca}", f"runtime.server_results={there}"]
    launched = launch(folder, *words, "runtime.stop_on_interrupt=true")
    said = read_until(launched, "round   1/2")
    launched.send_signal(signal.SIGINT)
    code, rest = finish(launched)
    assert code == 130, said + rest
    assert "stopped, and run" in rest
    assert status(federation, folder) == "finished:stopped"
    assert [row["round"] for row in read_rows(folder / "metrics.jsonl")] == [0, 1]
    code, said = finish(launch(folder, *words, "resume=true"))
    assert code == 0, said + federation.said()
    assert "round   1/2" not in said
    [server] = there.iterdir()
    assert f"model    {server} at the server" in said
    assert finish(launch(alone, "strategy=fedpvr", "runtime=local"))[0] == 0
    assert summary_of(folder)["parameters_sha256"] == summary_of(alone)["parameters_sha256"]
    assert not (folder / "model.safetensors").exists()
    assert read_rows(folder / "metrics.jsonl") == read_rows(server / "metrics.jsonl")


IMAGES = {0: 3, 1: 5, 2: 9}  # by site; no other three of these numbers have this sum


def write_images(folder: Path, classes: dict[str, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def test_a_sweep_in_the_server_app_container_trains_on_each_sites_own_images(federation):
    """By `docker compose exec serverapp fedhet -m ...`, which shares its results with the server.

    The first job fails; only the server holds the test set.
    """
    for site, count in IMAGES.items():
        mine = federation.folder / f"site-{site}" / "data" / "train"
        write_images(mine, {"cat": count} if site == 1 else {"cat": 1, "dog": count - 1}, site)
    tested = federation.folder / "server" / "data" / "image_folder" / "test"
    write_images(tested, {"cat": 4, "dog": 3}, 7)
    done = federation.execute(
        "serverapp",
        *("python", "-m", "fedhet.launch", "-m", "runtime=deployment", "clients=3"),
        *("runtime.address=127.0.0.1:8000", "hydra.sweep.dir=/results/images", "rounds=1"),
        *("task=image_folder", "task.classes=[cat,dog]", "task.image_size=12", "task.model=mlp"),
        *("partition=site", "strategy=scaffold", "local.momentum=0.9,0", "local.batch_size=2"),
        *("local.epochs=1",),
    )
    assert done.returncode == 1, done.stdout + federation.said()
    assert "the run failed" in done.stdout
    assert "strategy.scaffold.option=II reads" in done.stdout
    assert "Traceback" not in done.stdout
    jobs = (federation.folder / "server" / "results" / "images").iterdir()
    failed, folder = sorted(path for path in jobs if path.name[0].isdigit())
    assert (summary_of(failed)["status"], summary_of(folder)["status"]) == ("failed", "completed")
    assert (folder / "model.safetensors").exists()
    row = read_rows(folder / "metrics.jsonl")[1]
    assert row["num_examples"] == sum(IMAGES.values())
    assert (row["clients"], row["failures"]) == (list(SITES), [])
    assert row["accuracy"] * 7 == pytest.approx(round(row["accuracy"] * 7))
    for site in SITES:
        mine = federation.folder / f"site-{site}"
        assert list((mine / "state" / "clients").glob(f"*/client-{site:05}/*.safetensors"))
        assert not list(mine.rglob("image_folder-test*"))


# ---- strangers -----------------------------------------------------------------------------------

CA = "--root-certificates=/run/secrets/ca.crt"
KEY = "--auth-supernode-private-key=/run/secrets/node.key"
STRANGERS = {  # changes to supernode-0's command, and what it then says
    "an unregistered key": (
        {KEY: "--auth-supernode-private-key=/stranger/site/keys/node.key"},
        "[code: 2004] Failed to activate SuperNode",
    ),
    "no key": ({KEY: ""}, "[code: 2001] SuperNode authentication is enabled"),
    "the key of a connected node": ({}, "[code: 2004] Failed to activate SuperNode"),
    "another CA": (
        {CA: "--root-certificates=/stranger/server/keys/ca.crt"},
        "CERTIFICATE_VERIFY_FAILED",
    ),
    "no TLS": ({CA: "--insecure", KEY: ""}, "Socket closed"),
}


def test_strangers_are_refused_as_nodes_and_every_key_is_registered_once(federation, tmp_path):
    make_keys(tmp_path, "site", "stranger")
    make_keys(tmp_path, "server", "fl.example.org")
    service = federation.services["supernode-0"]
    service = replace(service, mounts={**service.mounts, "/stranger": tmp_path})

    def refused(number: int, changes: dict[str, str]) -> tuple[int, str]:
        changes = {**changes, "--port=9094": f"--port={9194 + number}"}
        assert set(changes) <= set(service.words)
        words = [changes.get(word, word) for word in (*service.words, "--max-retries=1")]
        done = federation.execute_as(service, *filter(None, words))
        return done.returncode, done.stdout

    with ThreadPoolExecutor() as pool:
        changes = [changes for changes, _ in STRANGERS.values()]
        found = dict(zip(STRANGERS, pool.map(refused, range(5), changes), strict=True))
    for name, (_, message) in STRANGERS.items():
        assert found[name][0] == 1, name
        assert message in found[name][1], name
    before = {node["node-id"] for node in federation.nodes()}
    assert federation.checked("register").count("is registered already") == len(SITES)
    assert {node["node-id"] for node in federation.nodes()} == before
    assert {node["status"] for node in federation.nodes()} == {"online"}
    assert len(before) == len(SITES)


# ---- the one port --------------------------------------------------------------------------------


def connect(ca: Path, address: tuple[str, int], *protocols: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=ca)
    context.set_alpn_protocols(list(protocols))
    plain = socket.create_connection(address, timeout=20)
    return context.wrap_socket(plain, server_hostname=address[0])


def talk_http1(connected: socket.socket) -> None:
    client = http.client.HTTPConnection("server")
    client.sock = connected
    client.request("GET", "/health")
    client.getresponse()


def test_the_sites_port_speaks_only_http2_over_tls(ca, fleet):
    no_answer = (OSError, http.client.HTTPException)
    with connect(ca, fleet, "http/1.1", "h2") as secure:
        assert secure.version() == "TLSv1.3"
        assert secure.selected_alpn_protocol() == "h2"
    with connect(ca, fleet, "http/1.1") as secure:
        assert secure.selected_alpn_protocol() is None
        with pytest.raises(no_answer):
            talk_http1(secure)
    with socket.create_connection(fleet, timeout=20) as plain, pytest.raises(no_answer):
        talk_http1(plain)
    with connect(ca, (fleet[0], 8000), "http/1.1", "h2") as secure:  # Control answers the same
        assert secure.selected_alpn_protocol() is None
        talk_http1(secure)


def test_the_sites_port_has_no_control_and_fleet_only_for_registered_keys(ca, fleet):
    """Every method of both, called with the CA's certificate and without a key."""
    answers = status_by_method("{}:{}".format(*fleet), str(ca))
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
