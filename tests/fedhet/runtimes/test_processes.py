"""No process outlives a launch, whatever it did to be on its own and however the launch ends."""

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

MARK = "FEDHET_TEST_MARK"
# A process that starts another in a session of its own and leaves it behind; both ignore SIGTERM.
LEAVES_A_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    open(sys.argv[1], "w").write(str(os.getpid()))
    time.sleep(60)
"""
# A server that goes on when its worker is gone, as one that takes it for a failed client.
GOES_ON = """
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
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture(params=[0, 1], ids=["init_adopts", "this_process_adopts"])
def adopting(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let orphans go to init, and to this process, whatever an earlier test has set."""
    if sys.platform != "linux":
        pytest.skip("only Linux lets a process adopt orphans")
    libc = ctypes.CDLL(None)
    before = ctypes.c_int()
    libc.prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    libc.prctl(36, request.param, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    yield
    libc.prctl(36, before.value, 0, 0, 0)


@pytest.mark.flower
@pytest.mark.usefixtures("adopting")
def test_a_process_that_left_its_parent_is_found_and_ended(tmp_path: Path) -> None:
    process_tree = ProcessTree(MARK, str(tmp_path))
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    stranger_brood = ProcessTree(MARK, "another launch")
    note = tmp_path / "pid"
    parent = subprocess.Popen(
        [sys.executable, "-c", LEAVES_A_CHILD, str(note)],
        env=os.environ | {MARK: str(tmp_path)},
    )
    try:
        assert parent.wait(timeout=20) == 0
        assert wait_for(lambda: note.exists() and note.read_text() != "")
        orphan = psutil.Process(int(note.read_text()))
        assert orphan in process_tree.members()
        assert orphan not in stranger_brood.members()
        stranger_brood.end()
        assert orphan.is_running()
        assert stranger.poll() is None
        process_tree._others |= {psutil.Process(stranger.pid)}
        process_tree.end()
        assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.flower
def test_none_sees_another_end(tmp_path: Path) -> None:
    process_tree = ProcessTree(MARK, str(tmp_path))
    written = tmp_path / "round"
    server = subprocess.Popen(
        [sys.executable, "-c", GOES_ON, str(written)],
        env=os.environ | {MARK: str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == "started\n"
    process_tree.end()
    server.wait()
    assert not written.exists()
    assert not process_tree.members()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_the_guard_cleans_up_after_a_killed_launcher(tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    folder.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "started\n"
    process_tree = ProcessTree(MARK, str(folder))
    assert wait_for(
        lambda: bool(process_tree.members())
    )  # its environment is readable once exec is done
    launcher.kill()
    launcher.wait()
    assert wait_for(lambda: not folder.exists())
    assert not process_tree.members()
