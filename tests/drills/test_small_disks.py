"""Disks that are full: a server's, a client's and a sweep's; and writers that are killed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedhet.common.results import read_rows
from fedhet.conf import compose
from fedhet.server_app.app import last_checkpoint
from tests.drills.scene import RECIPE, attended, equal_tensors, run_alone
from tests.fedhet.sweep.sweeps import wait_for
from tests.processes import Fork, finish
from tests.recipes import TINY, overrides

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk needs root"
    ),
]
NUM_TENSORS = 8  # of a checkpoint: model and control variate
LAST = "checkpoints/round-000003.safetensors"


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Mount an empty disk of that size over a folder; yield a file that may fill it."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    subprocess.run(["mount", *words], check=True)
    try:
        yield folder / "ballast"
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Write until the disk is full."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def run(
    folder: Path, *words: str, took_part: Mapping[int, tuple[int, ...]] | None = None, **grid: Any
) -> list[dict]:
    """Run three rounds; return the rows of metrics.jsonl."""
    words = (*RECIPE, "rounds=3", *words)
    last = last_checkpoint(compose(overrides(*words, f"results_dir={folder}")), folder)
    run_alone(folder, words, attended(words, took_part or {}, **grid), last)
    return read_rows(folder / "metrics.jsonl")


def test_a_full_results_disk_ends_the_run_which_can_be_resumed(tmp_path):
    run(tmp_path / "undisturbed")
    folder = tmp_path / "small"
    with small_disk(folder, 16) as ballast:
        with pytest.raises(OSError, match=rf"{folder}/.* could not be written.*No space left"):
            run(folder, before={2: lambda: fill(ballast)})
        # Round 2's checkpoint is written beside round 3; the last block may have room for lines.
        left = [row["round"] for row in read_rows(folder / "metrics.jsonl")]
        assert left in ([0, 1], [0, 1, 2], [0, 1, 2, 3])
        assert sorted(path.stem for path in folder.glob("checkpoints/*")) == ["round-000001"]
        ballast.unlink()
        rows = run(folder, "resume=true")
        assert [row["round"] for row in rows] == [0, 1, 2, 3]
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
        assert equal_tensors(folder / LAST, tmp_path / "undisturbed" / LAST) == NUM_TENSORS


def test_a_sweep_on_a_full_disk_says_so_and_leaves_nothing_running(tmp_path):
    folder = tmp_path / "small" / "sweep"
    words = [*TINY, "rounds=10000", "checkpoint.every=0", "seed=0,1", f"hydra.sweep.dir={folder}"]
    with small_disk(folder.parent, 3) as ballast, Fork(tmp_path, "-m", *words) as launch:
        wait_for(lambda: any(folder.glob("*_seed0_*/metrics.jsonl")))
        fill(ballast)
        code, output = finish(launch)
        assert code == 1
        assert f"{folder}/sweep.json could not be written" in output
        assert "No space left on device" in output
        assert [path.name for path in folder.glob(".sweep*")] == []


def test_a_full_disk_at_a_client_costs_only_its_replies(tmp_path):
    """Client 1 cannot store its control variate of round 2: as if it had been absent."""
    state = tmp_path / "state"
    with small_disk(state, 8) as ballast:
        rows = run(
            tmp_path / "small",
            before={2: lambda: fill(ballast), 3: ballast.unlink},
            node_config=lambda client: {"state-folder": str(state)} if client == 1 else {},
        )
    assert [row["clients"] for row in rows[1:]] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    (said,) = rows[2]["failures"]
    assert said.startswith("client 1: error 2: ")
    assert "round-000002.safetensors could not be written" in said
    assert "No space left on device" in said
    run(tmp_path / "absent", took_part={2: (0, 2)})
    assert equal_tensors(tmp_path / "small" / LAST, tmp_path / "absent" / LAST) == NUM_TENSORS
