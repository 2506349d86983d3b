"""Fixtures that write results directories of finished runs by hand, without training."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedhet.report.run_data import Run, read_run

ROUND_BYTES = (1_000_000, 2_000_000)  # up and down


def recipe(method: str, seed: int, **settings: Any) -> dict[str, Any]:
    """Return a small config.yaml; ``partition__alpha=0.1`` sets a nested key."""
    config: dict[str, Any] = {
        "clients": 10,
        "rounds": 3,
        "seed": seed,
        "server": {"lr": 1.0},
        "task": {"name": "digits", "model": "mlp", "mean": [0.3]},
        "partition": {"name": "dirichlet", "alpha": 0.1, "seed": None},
        "local": {"lr": 0.1},
        "strategy": {"methods": {method: []}, "sampler": {"seed": seed}},
        "results_dir": f"/somewhere/{method}/{seed}",
        "paper": None,
    }
    for key, value in settings.items():
        *parents, last = key.split("__")
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return config


def rows_of(accuracies: Sequence[float], **columns: float) -> list[dict[str, Any]]:
    """Return lines of metrics.jsonl: accuracies from round 0 on, 3 MB per round."""
    up, down = ROUND_BYTES
    sent = {"bytes_up": up, "bytes_down": down, "clients": [0, 1], "failures": []}
    first = {"round": 0, "accuracy": accuracies[0], "loss": 2.0}
    return [first] + [
        {"round": number, "accuracy": accuracy, "loss": 1.0 / number, **sent, **columns}
        for number, accuracy in enumerate(accuracies[1:], start=1)
    ]


def summary_of(method: str, seed: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    accuracies = [row["accuracy"] for row in rows]
    return {
        **{"format": 2, "strategy": method, "seed": seed, "rounds": len(rows) - 1, "failures": 0},
        **{"accuracy": accuracies[-1], "best_accuracy": max(accuracies)},
        **{"wall_seconds": 2.5, "seconds_per_round": 0.5},
        "bytes_up": 1_000_000 * (len(rows) - 1),
        "bytes_down": 2_000_000 * (len(rows) - 1),
        "versions": {"fedhet": "0.1.0", "torch": "2.15.0"},
        "fingerprint": {"recipe": f"recipe{seed}", "code": "code1"},
        "machine": {"cpu": "a CPU", "cores": 2, "gpu": "none used"},
        "status": "completed",
    }


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing, as if the extra `plots` were missing: drawing takes seconds."""
    for name, module in list(sys.modules.items()):
        ours = name.startswith(("fedhet.report.", "fedhet.reproductions."))
        for name in ("can_plot", "can_draw"):
            if ours and hasattr(module, name):
                monkeypatch.setattr(module, name, lambda: False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


WriteRun = Callable[..., Path]


@pytest.fixture
def write_run(tmp_path: Path) -> WriteRun:
    """Return a function that writes a results directory into ``tmp_path / sweep``."""

    def write(
        method: str = "fedavg",
        seed: int = 0,
        accuracies: Sequence[float] = (0.1, 0.3, 0.6, 0.5),
        *,
        sweep: str = "sweep",
        name: str = "",
        columns: dict[str, float] | None = None,
        summary: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Path:
        folder = tmp_path / sweep
        folder.mkdir(exist_ok=True)
        folder = folder / (name or f"{len(list(folder.iterdir()))}_{method}_seed{seed}")
        folder.mkdir()
        config = recipe(method, seed, **settings)
        (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        rows = rows_of(accuracies, **(columns or {}))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = summary_of(method, seed, rows) | (summary or {})
        (folder / "summary.json").write_text(json.dumps(found))
        return folder

    return write


@pytest.fixture
def finished_run(write_run: WriteRun) -> Callable[..., Run]:
    """Return a function that writes a results directory and reads it as the report does."""

    def write_and_read(*words: Any, **settings: Any) -> Run:
        folder = write_run(*words, **settings)
        return read_run(folder, folder.name, 0)

    return write_and_read
