"""`fedhet runtime=deployment` on a federation of processes: TLS, node keys, three sites.

What runs is docker/federation.yaml (tests/deployed.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file

from common.results import read_rows
from fedhet.runtimes.deployment import connection
from fedhet.runtimes.deployment.connection import Connection, check_reachable
from fedhet.runtimes.flower_install import LaunchError
from strategies.round.tensor_files import parameters_sha256
from tests.deployed import MARKS, RECIPE, SECONDS, SITES, Deployment, Loopback
from tests.tunnel import Tunnel

pytestmark = MARKS
IMAGES = {0: 3, 1: 5, 2: 9}  # by site; no other three of these numbers have this sum


@pytest.fixture(scope="module")
def ca(federation: Deployment) -> Path:
    return federation.folder / "server" / "keys" / "ca.crt"


@pytest.fixture(scope="module")
def address(federation: Deployment) -> str:
    assert isinstance(federation.network, Loopback)
    return f"{federation.network.address('network')}:8000"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the summary of FedPVR with runtime=local."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    launch = start("strategy=fedpvr", "runtime=local", f"results_dir={folder}")
    assert finish(launch)[0] == 0
    return summary_of(folder)


def start(*words: str, flags: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedhet.launch", *flags, *RECIPE, *words],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(launch: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = launch.communicate(timeout=SECONDS)
    finally:
        launch.kill()  # one that is done does not mind
    return launch.returncode, output


def until(launch: subprocess.Popen[str], words: str) -> str:
    """Return what a launch says until it says these words."""
    assert launch.stdout is not None
    said = ""
    for line in launch.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(f"it ended without saying {words!r}: {said}")


def summary_of(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "summary.json").read_text())
    assert isinstance(found, dict)
    return found


def status(federation: Deployment, folder: Path) -> str:
    run_id = json.loads((folder / "deployment.json").read_text())["run_id"]
    words = ["flwr", "list", "fedhet", "--run-id", str(run_id), "--format", "json"]
    done = federation.execute("superlink", *words)
    return str(json.loads(done.stdout[done.stdout.index("{") :])["runs"][0]["status"])


def test_a_run_over_a_tunnel_that_breaks_goes_on_after_ctrl_c_and_is_followed_again(
    federation, ca, address, alone, tmp_path
):
    """The server writes to a folder of its own; all of it is fetched."""
    host, _, port = address.partition(":")
    here, there = tmp_path / "here", tmp_path / "there"
    with Tunnel((host, int(port))) as tunnel:
        words = [
            "strategy=fedpvr",
            "runtime=deployment",
            f"runtime.address=127.0.0.1:{tunnel.port}",
            f"runtime.root_certificates={ca}",
            f"runtime.server_results={there}",
            "runtime.fetch='cp -R {server}/. {here}'",
            f"results_dir={here}",
        ]
        launch = start(*words)
        said = until(launch, "round   0/2")
        tunnel.cut()
        time.sleep(3)
        tunnel.mend()
        said += until(launch, "round   1/2")
        launch.send_signal(signal.SIGINT)
        code, rest = finish(launch)
        assert code == 130, said + rest
        assert "goes on. Follow it again" in rest
        assert (said + rest).count("round   0/2") == 1
        first = json.loads((here / "deployment.json").read_text())["run_id"]
        assert status(federation, here) in ("running", "finished:completed")
        code, said = finish(start(*words, "resume=true"))
    assert code == 0, said + federation.said()
    assert "round   2/2" in said
    assert json.loads((here / "deployment.json").read_text())["run_id"] == first
    summary = summary_of(here)
    assert summary["parameters_sha256"] == alone["parameters_sha256"]
    assert summary["accuracy"] == alone["accuracy"]
    [server] = there.iterdir()
    stored = load_file(here / "model.safetensors")
    assert parameters_sha256(stored) == alone["parameters_sha256"]
    assert read_rows(here / "metrics.jsonl") == read_rows(server / "metrics.jsonl")
    assert (here / "checkpoints" / "round-000002.safetensors").exists()
    log = (here / "log.txt").read_text()
    assert "fedhet-told" not in log
    assert log.count("Registered 3 clients") == 1


def test_a_run_that_ctrl_c_stops_is_resumed_from_its_checkpoint(
    federation, ca, address, alone, tmp_path
):
    """The server writes to a folder of its own, and nothing is fetched."""
    folder, there = tmp_path / "run", tmp_path / "there"
    words = ["strategy=fedpvr", "runtime=deployment", f"runtime.address={address}"]
    words += [f"runtime.root_certificates={ca}", f"results_dir={folder}"]
    words += [f"runtime.server_results={there}", "runtime.stop_on_interrupt=true"]
    launch = start(*words)
    said = until(launch, "round   1/2")
    launch.send_signal(signal.SIGINT)
    code, rest = finish(launch)
    assert code == 130, said + rest
    assert "and run" in rest
    assert status(federation, folder) == "finished:stopped"
    assert [row["round"] for row in read_rows(folder / "metrics.jsonl")] == [0, 1]
    code, said = finish(start(*words, "resume=true"))
    assert code == 0, said + federation.said()
    assert "round   1/2" not in said
    [server] = there.iterdir()
    assert f"model    {server} at the server" in said
    assert summary_of(folder)["parameters_sha256"] == alone["parameters_sha256"]
    assert not (folder / "model.safetensors").exists()
    assert read_rows(folder / "metrics.jsonl") == read_rows(server / "metrics.jsonl")


def test_too_few_supernodes_are_refused_before_the_run(federation, ca, address, tmp_path):
    words = ["clients=5", "runtime=deployment", f"runtime.address={address}"]
    words += [f"runtime.root_certificates={ca}", f"results_dir={tmp_path / 'run'}"]
    code, said = finish(start(*words))
    assert code == 1
    assert "clients=5, but 3 SuperNodes are connected" in said
    assert not (tmp_path / "run" / "deployment.json").exists()


def test_another_release_of_flower_is_refused(address, ca, monkeypatch):
    """The SuperLink says which it is."""
    check_reachable(Connection(address, str(ca)))
    monkeypatch.setattr(connection, "FLOWER", "1.38")
    with pytest.raises(LaunchError, match=r"is of flwr 1\.39\.0, and this .* written for 1\.38"):
        check_reachable(Connection(address, str(ca)))


def test_a_sweep_goes_on_past_a_run_that_failed_and_says_why(federation, ca, address, tmp_path):
    """Launcher and server write to the same folders."""
    words = ["strategy=scaffold", "local.momentum=0.9,0", "rounds=1", "runtime=deployment"]
    words += [f"runtime.address={address}", f"runtime.root_certificates={ca}"]
    code, said = finish(start(*words, f"hydra.sweep.dir={tmp_path}", flags=("-m",)))
    assert code == 1, said + federation.said()
    assert "the run failed" in said
    assert "option II of SCAFFOLD" in said
    assert "Traceback" not in said
    failed, done = sorted(path for path in tmp_path.iterdir() if path.name[0].isdigit())
    assert (summary_of(failed)["status"], summary_of(done)["status"]) == ("failed", "completed")
    assert (done / "model.safetensors").exists()


# ---- each site's own data ------------------------------------------------------------------------


def write_images(folder: Path, classes: dict[str, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def test_sites_train_on_their_own_folders_and_the_server_tests_on_its_own(federation):
    """By `docker compose exec serverapp fedhet ...`; nobody but the server holds the test set."""
    for site, count in IMAGES.items():
        mine = federation.folder / f"site-{site}" / "data" / "train"
        write_images(mine, {"cat": count} if site == 1 else {"cat": 1, "dog": count - 1}, site)
    tested = federation.folder / "server" / "data" / "image_folder" / "test"
    write_images(tested, {"cat": 4, "dog": 3}, 7)
    done = federation.execute(
        "serverapp",
        *("python", "-m", "fedhet.launch", "runtime=deployment"),
        *("runtime.address=127.0.0.1:8000", "results_dir=/results/images", "clients=3"),
        *("task=image_folder", "task.classes=[cat,dog]", "task.image_size=12", "task.model=mlp"),
        *("partition=site", "strategy=scaffold", "local.momentum=0", "local.batch_size=2"),
        *("local.epochs=1", "rounds=1"),
    )
    assert done.returncode == 0, done.stdout + federation.said()
    folder = federation.folder / "server" / "results" / "images"
    assert (folder / "model.safetensors").exists()
    rows = read_rows(folder / "metrics.jsonl")
    assert rows[1]["num_examples"] == sum(IMAGES.values())
    assert rows[1]["clients"] == list(SITES)
    assert rows[1]["failures"] == []
    assert rows[1]["accuracy"] * 7 == pytest.approx(round(rows[1]["accuracy"] * 7))
    for site in SITES:
        own = federation.folder / f"site-{site}"
        assert list((own / "state" / "clients").glob(f"*/client-{site:05}/*.safetensors"))
        assert not list(own.rglob("image_folder-test*"))
