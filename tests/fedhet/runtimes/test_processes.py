"""No process outlives a launch, even if it left its parent and nobody adopts it.

In tests/test_runtimes.py launchers adopt such processes, and are killed, so that their watchdog
ends the rest.
"""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedhet.runtimes.processes import ProcessTree

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only"),
]
MARK = "FEDHET_TEST_MARK"
# Leaves a process behind in a session of its own; both ignore SIGTERM.
LEAVES_A_CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    time.sleep(60)
"""
# A server that continues after its worker's end, as if a client had failed.
CONTINUES = """
import os, signal, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
worker.wait()
open("a round with a failure", "w")
"""


def started(program: str, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """Start a program with the folder as its mark; return it and the pid that it prints."""
    words = [sys.executable, "-c", program]
    marked = os.environ | {MARK: str(folder)}
    process = subprocess.Popen(words, cwd=folder, env=marked, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_an_orphan_is_ended_and_other_processes_are_not(tmp_path):
    tree = ProcessTree(MARK, str(tmp_path))
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other_launch = ProcessTree(MARK, "another launch")
    try:
        parent, pid = started(LEAVES_A_CHILD, tmp_path)
        assert parent.wait(timeout=20) == 0
        orphan = psutil.Process(pid)
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
    server, _ = started(CONTINUES, tmp_path)
    tree.end()
    server.wait()
    assert not list(tmp_path.iterdir())
    assert not tree.members()
