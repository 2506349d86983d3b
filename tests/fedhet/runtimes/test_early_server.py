"""The server's process that `fedhet` starts before it knows the recipe."""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from fedhet.conf import compose_overrides
from fedhet.runtimes.local.early_server import EarlyServer, early_server
from tests.processes import alive, finish, start, summary_of
from tests.recipes import run_recipe
from tests.refused import refused

TINY = ("rounds=1", "clients=2", "task.train_size=40", "task.test_size=20", "local.epochs=1")

linux = pytest.mark.skipif(sys.platform != "linux", reason="started early on Linux alone")


@pytest.mark.parametrize(
    "words", [["runtime=flower"], ["runtime=deployment"], ["-m", "seed=0,1"], ["--cfg", "job"]]
)
def test_what_is_no_single_local_run_starts_none(words):
    assert early_server(words) is None


@pytest.mark.slow
@linux
def test_it_checks_recipes_and_leaves_nothing_when_it_is_dismissed():
    server = early_server(["seed=1", "runtime=local"])
    assert server is not None
    process = psutil.Process(server.process.pid)
    try:
        wrong = compose_overrides(("strategy=[fedprox,fedpvr]", "strategy.fedpvr.layers=last:0"))
        server.begin_check(wrong)
        with refused("last:0"):
            server.end_check()
        server.begin_check(compose_overrides(()))
        assert server.end_check()
    finally:
        server.dismiss()
    assert not alive([process])


@linux
def test_one_that_has_died_can_serve_nothing():
    server = EarlyServer()
    assert server.process.pid
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.join()
    server.begin_check(compose_overrides(()))
    assert not server.end_check()
    server.dismiss()


@pytest.mark.flower
@linux
def test_the_run_is_the_same_if_it_dies(tmp_path: Path):
    launch = start(tmp_path, *TINY, f"results_dir={tmp_path}/run")
    _child(psutil.Process(launch.pid)).kill()
    code, output = finish(launch)
    assert code == 0, output
    expected = run_recipe(tmp_path / "expected", *TINY)
    assert summary_of(tmp_path / "run")["parameters_sha256"] == expected["parameters_sha256"]


@pytest.mark.flower
@linux
def test_a_word_that_is_wrong_ends_it_with_the_launcher(tmp_path: Path):
    launch = start(tmp_path, "local.lr=-1")
    child = _child(psutil.Process(launch.pid))
    code, output = finish(launch)
    assert code == 1
    assert "local.lr=-1 is not allowed" in output
    assert not alive([child])


@pytest.mark.flower
@linux
def test_ctrl_c_before_the_launcher_handles_it_ends_both(tmp_path: Path):
    heard = ("env", "--default-signal=INT")  # a shell lets its background jobs ignore it
    launch = start(tmp_path, "rounds=1", prefix=heard)
    child = _child(psutil.Process(launch.pid))
    launch.send_signal(signal.SIGINT)
    try:
        launch.communicate(timeout=60)
    finally:
        launch.kill()
    assert launch.returncode in (-signal.SIGINT, 130)
    psutil.wait_procs([child], timeout=60)  # it may have been forked a moment ago
    assert not alive([child])


def _child(launcher: psutil.Process) -> psutil.Process:
    end = time.monotonic() + 60
    while not (children := launcher.children()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return children[0]
