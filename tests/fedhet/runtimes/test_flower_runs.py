"""Real runs by the console command: results, exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import alive

pytestmark = pytest.mark.flower

FEDHET = str(Path(sys.executable).with_name("fedhet"))
RUNTIMES = pytest.mark.parametrize("runtime", ["flower", "local", "ray"])
SMALL = ["task=digits", "clients=4", "rounds=2", "local.epochs=1"]
Family = set[psutil.Process]


def start(cwd: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [FEDHET, *words],
        cwd=cwd,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(launch: subprocess.Popen[str]) -> str:
    output, _ = launch.communicate(timeout=240)
    return output


def lines_until(launch: subprocess.Popen[str], start_of_line: str) -> Iterator[str]:
    assert launch.stdout is not None
    for line in launch.stdout:
        yield line
        if line.startswith(start_of_line):
            return
    pytest.fail(f"the launch ended with {launch.wait()} before a line {start_of_line!r}")


def family(launch: subprocess.Popen[str]) -> Family:
    return set(psutil.Process(launch.pid).children(recursive=True))


def summary_of(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert isinstance(summary, dict)
    return summary


@RUNTIMES
def test_a_run_ends_with_its_accuracy_and_where_the_results_are(
    tmp_path: Path, runtime: str
) -> None:
    launch = start(tmp_path, *SMALL, f"runtime={runtime}")
    output = finish(launch)
    assert launch.returncode == 0, output
    [folder] = (tmp_path / "results").iterdir()
    assert folder.name.endswith("_fedavg_digits_seed0")
    assert {"config.yaml", "log.txt", "metrics.jsonl", "plot.png", "summary.json"} <= {
        path.name for path in folder.iterdir()
    }
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]
    summary = summary_of(folder)
    assert (summary["status"], summary["rounds"]) == ("completed", 2)
    assert f"accuracy       {100 * summary['accuracy']:.2f} %" in output
    assert f"results  {folder}\n" in output
    assert f"plot     {folder}/plot.png\n" in output
    assert "round   2/2" in output
    assert "ray" not in output.lower()


@RUNTIMES
def test_a_failed_run_says_why_and_does_not_exit_with_0(tmp_path: Path, runtime: str) -> None:
    words = ["strategy=scaffold", "local.momentum=0.9", "results_dir=out", f"runtime={runtime}"]
    launch = start(tmp_path, *SMALL, *words)
    output = finish(launch)
    assert launch.returncode == 1, output
    assert "fedhet: the run failed: " in output
    assert "momentum" in output
    assert "Traceback" not in output
    assert f"its log: {tmp_path}/out/log.txt" in output
    assert "momentum" in (tmp_path / "out" / "log.txt").read_text(encoding="utf-8")


def test_a_ray_that_no_client_fits_says_so(tmp_path: Path) -> None:
    words = [*SMALL, "runtime=ray", "runtime.client_gpus=1000", "device=auto", "results_dir=out"]
    launch = start(tmp_path, *words)
    output = finish(launch)
    assert launch.returncode == 1, output
    assert "no client fits the Ray cluster" in output
    assert "runtime.client_gpus" in output
    assert not folders_of(launch)


def folders_of(launch: subprocess.Popen[str]) -> list[Path]:
    name = f"fedhet-{launch.pid}-*"
    return [path for parent in ("/dev/shm", "/tmp") for path in Path(parent).glob(name)]


STOPS = {"int": (signal.SIGINT, 130), "term": (signal.SIGTERM, 143), "kill": (signal.SIGKILL, -9)}


@pytest.mark.parametrize(
    ("runtime", "stop"),
    [  # what a signal does is the launcher's; what is left after it differs by runtime
        *(("flower", stop) for stop in STOPS),
        ("local", "int"),
        ("local", "kill"),
        ("ray", "term"),
        ("ray", "kill"),
    ],
)
def test_a_stopped_run_leaves_nothing_running(tmp_path: Path, stop: str, runtime: str) -> None:
    number, code = STOPS[stop]
    words = [*SMALL, f"runtime={runtime}", "rounds=10000", "results_dir=out"]
    launch = start(tmp_path, *words)
    list(lines_until(launch, "round   2/"))
    started = family(launch)
    names = {process.name() for process in started}
    assert len(started) >= 3, names  # a server and two workers at the least
    assert ("flower-superlin" in names) == (runtime == "flower"), names
    assert ("raylet" in names) == (runtime != "local"), names
    assert len(folders_of(launch)) == 1
    launch.send_signal(number)
    finish(launch)
    assert launch.returncode == code
    deadline = time.monotonic() + (20 if number == signal.SIGKILL else 0)  # by the guard, then
    while alive(started) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(started)
    assert not folders_of(launch)


def test_what_ray_leaves_behind_is_ended_when_launcher_and_server_are_killed(
    tmp_path: Path,
) -> None:
    launch = start(tmp_path, *SMALL, "runtime=ray", "rounds=10000", "results_dir=out")
    list(lines_until(launch, "round   1/"))
    started = family(launch)
    for process in started:  # as on a starved machine: they do not see that the raylet has gone
        if process.name().startswith("ray::"):
            process.suspend()
    [server] = psutil.Process(launch.pid).children()
    launch.kill()
    server.kill()
    finish(launch)
    psutil.wait_procs(started, timeout=20)
    assert not alive(started)
    assert not folders_of(launch)


def test_two_launches_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    launches = [start(tmp_path, *SMALL, f"results_dir={name}") for name in (1, 2, 3)]
    list(lines_until(launches[2], "round   0/"))
    launches[2].send_signal(signal.SIGINT)  # what it ends must be its own
    outputs = [finish(launch) for launch in launches]
    assert [launch.returncode for launch in launches] == [0, 0, 130], outputs
    first, second = summary_of(tmp_path / "1"), summary_of(tmp_path / "2")
    assert first["parameters_sha256"] == second["parameters_sha256"]


def test_a_sweep_goes_on_past_a_failed_run_and_fails_at_its_end(tmp_path: Path) -> None:
    words = [*SMALL, "runtime=local", "strategy=scaffold", "local.momentum=0.9,0"]
    launch = start(tmp_path, "-m", *words)
    output = finish(launch)
    assert launch.returncode == 1, output
    [sweep] = (tmp_path / "results").iterdir()
    failed, done = sorted(folder for folder in sweep.iterdir() if folder.is_dir())
    assert "the run failed" in output
    assert summary_of(done)["status"] == "completed"
    assert not (failed / "plot.png").exists()
