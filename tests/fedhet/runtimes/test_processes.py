"""No process outlives a launch, even if it left its parent or the launcher was killed."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedhet.runtimes.processes import ProcessTree

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only"),
]
MARK = "FEDHET_TEST_MARK"
# Starts a process in a session of its own and leaves it behind; both ignore SIGTERM.
LEAVES_A_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(60)
"""
# A server that continues after its worker's end, as if a client had failed.
CONTINUES = """
import signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("started", flush=True)
worker.wait()
open(sys.argv[1], "w").write("a round with a failure")
"""
LAUNCHER = """
import os, subprocess, sys, time
from pathlib import Path
from fedhet.runtimes.processes import Watchdog
folder = Path(sys.argv[1])
Watchdog(folder, "FEDHET_TEST_MARK", str(folder))
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"],
                 env=os.environ | {"FEDHET_TEST_MARK": str(folder)}, start_new_session=True)
print("started", flush=True)
time.sleep(60)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 15) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def started(program: str, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start a program; wait until it says that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


@pytest.fixture(params=[0, 1], ids=["init_adopts", "this_process_adopts"])
def adopting(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave orphans to init, or adopt them."""
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    libc.prctl(36, request.param, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    libc.prctl(36, before.value, 0, 0, 0)


@pytest.mark.usefixtures("adopting")
def test_an_orphan_is_ended_and_other_processes_are_not(tmp_path):
    tree = ProcessTree(MARK, str(tmp_path))
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other_launch = ProcessTree(MARK, "another launch")
    note = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", LEAVES_A_CHILD, str(note)],
        env=os.environ | {MARK: str(tmp_path)},
    )
    try:
        assert parent.wait(timeout=20) == 0
        assert wait_for(lambda: note.exists() and note.read_text() != "")
        orphan = psutil.Process(int(note.read_text()))
        assert orphan in tree.members()
        assert orphan not in other_launch.members()
        other_launch.end()
        assert orphan.is_running()
        assert stranger.poll() is None
        tree._others |= {psutil.Process(stranger.pid)}
        tree.end()
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_no_process_sees_another_end(tmp_path):
    tree = ProcessTree(MARK, str(tmp_path))
    written = tmp_path / "round"
    server = started(CONTINUES, str(written), **{MARK: str(tmp_path)})
    tree.end()
    server.wait()
    assert not written.exists()
    assert not tree.members()


def test_the_watchdog_cleans_up_after_a_killed_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    launcher = started(LAUNCHER, str(folder))
    tree = ProcessTree(MARK, str(folder))
    assert wait_for(lambda: bool(tree.members()))  # readable once exec is done
    launcher.kill()
    launcher.wait()
    assert wait_for(lambda: not folder.exists())
    assert not tree.members()
