"""Real Flower simulations: a killed run resumed, and the plain `flwr run .`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from common.results import read_rows
from tests.processes import alive
from tests.recipes import TINY, run_recipe

pytestmark = pytest.mark.flower

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
SCAFFOLD = [
    "task=digits",
    "strategy=scaffold",
    "clients=5",
    "participation=0.6",
    "local.epochs=1",
    "rounds=8",
]


def fedhet(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(BIN / "fedhet"), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(launch: subprocess.Popen[str]) -> None:
    output, _ = launch.communicate(timeout=240)
    assert launch.returncode == 0, output


def test_a_killed_run_resumed_equals_the_uninterrupted_one(tmp_path):
    """SCAFFOLD with a partial cohort: the clients' control variates survive the kill, too."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_recipe(whole, *SCAFFOLD, clients=5)  # in this process: the bits are the same
    launch = fedhet(*SCAFFOLD, "rounds=500", f"results_dir={cut}")
    deadline = time.monotonic() + 200
    metrics = cut / "metrics.jsonl"
    while not metrics.exists() or len(read_rows(metrics)) < 4:
        assert time.monotonic() < deadline
        assert launch.poll() is None
        time.sleep(0.02)
    started = psutil.Process(launch.pid).children(recursive=True)
    launch.send_signal(signal.SIGKILL)
    launch.communicate()
    psutil.wait_procs(started, timeout=20)  # the guard ends what the launcher started
    assert not alive(started)
    done = len(read_rows(metrics)) - 1
    if done >= 8:
        pytest.skip(f"the machine did {done} rounds before the kill arrived")
    finish(fedhet(*SCAFFOLD, f"results_dir={cut}", "resume=true"))
    first, second = (json.loads((d / "summary.json").read_text()) for d in (whole, cut))
    assert first["parameters_sha256"] == second["parameters_sha256"]
    assert first["bytes_up"] == second["bytes_up"]
    rows = [read_rows(d / "metrics.jsonl") for d in (whole, cut)]
    assert [r["accuracy"] for r in rows[0]] == [r["accuracy"] for r in rows[1]]


PRIVATE = [
    "task.train_size=150",
    "task.test_size=50",
    "strategy/aggregator=uniform_mean",
    "strategy/secure_aggregation=secagg_plus",
    "strategy/differential_privacy=central_fixed",
    "strategy.differential_privacy.noise_multiplier=0.01",
]


def test_secure_sums_and_central_privacy_give_the_bits_of_one_process(tmp_path):
    """Masks and keys differ from run to run, and what is unmasked does not."""
    words = [*TINY, *PRIVATE]
    finish(fedhet(*words, f"results_dir={tmp_path / 'flower'}"))
    here = run_recipe(tmp_path / "here", *words)
    there = json.loads((tmp_path / "flower" / "summary.json").read_text())
    assert (there["status"], there["failures"]) == ("completed", 0)
    assert there["parameters_sha256"] == here["parameters_sha256"]
    assert there["accuracy"] == here["accuracy"]
    row = read_rows(tmp_path / "flower" / "metrics.jsonl")[-1]
    assert "norm_ratio" not in row
    assert "dp_epsilon" in row


@pytest.fixture
def flower_home(tmp_path):
    """An own FLWR_HOME with own ports; the SuperLink that `flwr run` leaves behind is ended."""
    home = tmp_path / "flwr"
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "47391",
        "FLWR_LOCAL_CONTROL_API_PORT": "47393",
        "UV_OFFLINE": "1",
        "HOME": str(tmp_path),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    yield environment
    for process in psutil.process_iter():
        try:
            mine = process.environ().get("FLWR_HOME") == str(home)
        except psutil.Error:
            continue
        if mine:
            process.kill()


def test_plain_flwr_run(flower_home, tmp_path):
    """As the README has it: no file of the clone changes, nothing is installed, results appear."""
    before = (ROOT / "pyproject.toml").read_text()
    config = 'strategy="fedpvr" rounds=2 local.epochs=1 overrides="strategy.fedpvr.layers=last:1"'
    done = subprocess.run(
        [str(BIN / "flwr"), "run", str(ROOT), "--stream", "--run-config", config],
        cwd=tmp_path,
        env=flower_home,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    listed = subprocess.run(
        [str(BIN / "flwr"), "list", "local", "--format", "json"],
        env=flower_home,
        capture_output=True,
        text=True,
        timeout=60,
    )
    (run,) = json.loads(listed.stdout)["runs"]
    assert run["status"] == "finished:completed", done.stdout
    (folder,) = (tmp_path / "fedhet-results").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["strategy"], summary["rounds"]) == ("fedpvr", 2)
    assert (ROOT / "pyproject.toml").read_text() == before
