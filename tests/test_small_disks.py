"""Runs on disks that are really full, in one process: what tests/faults.py does to a federation."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from flwr.app import Message

from common.results import read_rows
from conf import compose
from server_app.app import last_checkpoint
from server_app.run import Run
from tests.faults import RECIPE, Attended, equal_tensors, fill, small_disk

pytestmark = [
    pytest.mark.flower,  # seconds
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="mounting a small disk needs root"
    ),
]
NUM_TENSORS = 8  # of a checkpoint: model and control variate
LAST = "checkpoints/round-000003.safetensors"


def run(
    folder: Path,
    grid: type[Attended] = Attended,
    node_configs: Mapping[int, Mapping[str, str]] | None = None,
    took_part: Mapping[int, tuple[int, ...]] | None = None,
    **options: object,
) -> list[dict]:
    """Run three rounds; return the lines of metrics.jsonl."""
    words = [f"{key}={value}" for key, value in options.items()]
    run_config = {"overrides": json.dumps([*RECIPE, "rounds=3", f"results_dir={folder}", *words])}
    recipe = compose(run_config)
    clients = grid(run_config, took_part or {}, node_configs)
    Run(recipe, folder, last_checkpoint(recipe, folder)).start(clients)
    return read_rows(folder / "metrics.jsonl")


def round_of(messages: list[Message]) -> int:
    return int(messages[0].content.config_records.get("config", {}).get("round", 0))


def before_round(which: int, act) -> type[Attended]:
    """Return clients before whose answers in a round something happens."""

    class Changing(Attended):
        def send_and_receive(
            self, messages: Iterable[Message], *, timeout: float | None = None
        ) -> Iterable[Message]:
            asked = list(messages)
            if round_of(asked) == which:
                act()
            return super().send_and_receive(asked, timeout=timeout)

    return Changing


def test_a_full_results_disk_ends_the_run_which_goes_on_when_there_is_room(tmp_path):
    run(tmp_path / "undisturbed")
    folder = tmp_path / "small"
    with small_disk(folder, 16) as ballast:
        clients = before_round(2, lambda: fill(ballast))
        with pytest.raises(OSError, match=rf"{folder}/.* could not be written.*No space left"):
            run(folder, clients)
        left = [row["round"] for row in read_rows(folder / "metrics.jsonl")]
        assert left in ([0, 1], [0, 1, 2])  # its last block has room for another line, or has not
        ballast.unlink()
        rows = run(folder, resume="true")
        assert [row["round"] for row in rows] == [0, 1, 2, 3]
        assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
        assert equal_tensors(folder / LAST, tmp_path / "undisturbed" / LAST) == NUM_TENSORS


def test_a_full_disk_at_a_client_costs_its_replies_and_nothing_else(tmp_path):
    """Client 1 cannot keep its control variate of round 2: as if it had not been there."""
    with small_disk(tmp_path / "state", 8) as ballast:
        clients = before_round(2, lambda: fill(ballast))
        freeing = before_round(3, ballast.unlink)

        class Both(clients, freeing):  # type: ignore[misc, valid-type]
            pass

        state = {1: {"state-folder": str(tmp_path / "state")}}
        rows = run(tmp_path / "small", Both, state)
    assert [row["clients"] for row in rows[1:]] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    (said,) = rows[2]["failures"]
    assert said.startswith("client 1: error 2: ")
    assert "round-000002.safetensors could not be written" in said
    assert "No space left on device" in said
    run(tmp_path / "absent", took_part={2: (0, 2)})
    assert equal_tensors(tmp_path / "small" / LAST, tmp_path / "absent" / LAST) == NUM_TENSORS
