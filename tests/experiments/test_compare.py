"""Rounds and bytes to a target, by hand."""

from __future__ import annotations

import json

from experiments.compare import draw, read_run, table


def write_run(folder, method, accuracies):
    folder.mkdir()
    (folder / "config.yaml").write_text("partition: {alpha: 0.1}\n")
    (folder / "summary.json").write_text(json.dumps({"strategy": method}))
    rows = [{"round": 0, "accuracy": 0.1}]
    rows += [
        {"round": i, "accuracy": value, "bytes_up": 1_000_000, "bytes_down": 2_000_000}
        for i, value in enumerate(accuracies, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_rounds_and_megabytes_to_a_target(tmp_path):
    """0.5 is first reached in round 2: two rounds of 3 MB; 0.9 never."""
    run = read_run(write_run(tmp_path / "a", "fedavg", [0.2, 0.5, 0.4]), "partition.alpha")
    assert (run.rounds_to(0.5), run.megabytes_to(0.5)) == (2, 6.0)
    assert (run.rounds_to(0.9), run.megabytes_to(0.9)) == (None, None)
    assert table([run], "partition.alpha", [0.5, 0.9]).splitlines()[2] == (
        "| 0.1 | fedavg | 50.0 | 30.0 | 2 | - | 6.0 | - |"
    )


def test_the_picture_is_drawn(tmp_path):
    runs = [
        read_run(write_run(tmp_path / name, name, [0.2, 0.5]), "partition.alpha")
        for name in ("fedavg", "scaffold")
    ]
    draw(runs, "partition.alpha", [0.4], tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
