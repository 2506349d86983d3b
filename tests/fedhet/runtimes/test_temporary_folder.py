"""The folder of a run while it runs: no two runs share one, and one without a process goes."""

import os
import subprocess
import sys

from fedhet.runtimes import temporary_folder as where
from fedhet.runtimes.temporary_folder import temporary_folder

WAITING = """
import sys
from pathlib import Path
from fedhet.runtimes.temporary_folder import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "sums").write_bytes(b"0" * 100)
    print(folder, flush=True)
    sys.stdin.read()
"""


def grow_old(folder):
    os.utime(folder, (0, 0))


def test_a_folder_whose_processes_were_all_killed_goes_and_no_other(tmp_path):
    words = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        theirs = tmp_path / other.stdout.readline().strip()
        (tmp_path / "fedhet-1-of-others").mkdir()  # without a lock: not one of ours
        for folder in tmp_path.iterdir():
            grow_old(folder)
        with temporary_folder(tmp_path) as ours:
            assert {ours, theirs, tmp_path / "fedhet-1-of-others"} == set(tmp_path.iterdir())
        assert not ours.exists()
        other.kill()
    assert (theirs / "sums").exists()
    os.utime(theirs)  # it may be one that has no lock yet
    with temporary_folder(tmp_path):
        assert theirs.exists()
    grow_old(theirs)
    with temporary_folder(tmp_path):
        assert not theirs.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["fedhet-1-of-others"]


def test_it_lies_on_disk_where_memory_has_little_room(tmp_path, monkeypatch):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(where, "MEMORY", memory)
    monkeypatch.setattr("tempfile.tempdir", str(disk))
    for least, expected in ((1, memory), (1 << 60, disk)):
        monkeypatch.setattr(where, "_LEAST_BYTES", least)
        with temporary_folder() as folder:
            assert folder.parent == expected
    memory.rmdir()  # another system than Linux has none
    with temporary_folder() as folder:
        assert folder.parent == disk
