"""How often the alarm names honest clients, and how often clients that lie in a payload.

Digits, 10 clients: 30 rounds of each method with nobody hostile, and 15 rounds (MA-Echo: one) in
which two clients lie in what the method sends beside the update.
"""

from __future__ import annotations

import io
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.harness import save
from fedhet import launch
from fedhet.common.results import METRICS, SUMMARY, read_rows
from fedhet.strategies.attacks.attack import hostile_clients

CLIENTS, HOSTILE = 10, 0.2
METHODS = ("scaffold", "fedpvr", "feddw", "maecho")
_TITLES = {"scaffold": "SCAFFOLD", "fedpvr": "FedPVR", "feddw": "FedDW", "maecho": "MA-Echo"}
_LIES = {"feddw": "soft_label_lie", "maecho": "projection_lie"}
_NAMED = re.compile(r"round (\d+): client (\d+) sent what is far longer than the others': (.*)")
_PART = re.compile(r"(\w+) \(z = (-?[\d.]+)\)")


def words_of(method: str, seed: int, lie: bool) -> list[str]:
    """Return the words of a run's command."""
    rounds = 30 if not lie else 1 if method == "maecho" else 15
    words = [f"strategy={method}", f"seed={seed}", f"rounds={rounds}", f"clients={CLIENTS}"]
    words += ["participation=1.0", "task=digits", "partition=dirichlet", "partition.alpha=0.3"]
    words += ["runtime=local", "device=cpu", "evaluation.received=false", "checkpoint.every=0"]
    if lie:
        attack = _LIES.get(method, "control_variate_lie")
        words += [f"attack={attack}", "attack.allow=true", f"attack.clients={HOSTILE}"]
    return words


def run(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run a command in this process; return its replies by client, and what the alarm named."""
    with redirect_stdout(io.StringIO()):
        sys.argv[:] = ["fedhet", *words, f"results_dir={folder}"]
        try:
            launch.main()
        except SystemExit as end:  # after the run, or instead of one
            if not (folder / SUMMARY).exists():
                raise SystemExit(f"{' '.join(sys.argv)}: {end}") from None
    rows = read_rows(folder / METRICS)
    replies = [client for row in rows for client in row.get("clients") or ()]
    return {
        "status": json.loads((folder / SUMMARY).read_text())["status"],
        "replies": {str(client): replies.count(client) for client in sorted(set(replies))},
        "named": named((folder / "log.txt").read_text()),
    }


def named(log: str) -> list[dict[str, Any]]:
    """Return round, client and the z-score of each part from the warnings of a log."""
    return [
        {"round": int(t), "client": int(client), "z": {n: float(z) for n, z in _PART.findall(what)}}
        for t, client, what in _NAMED.findall(log)
    ]


def measure(path: Path, seeds: int) -> None:
    """Run every method with and without its lie; the file is written after each run."""
    found = json.loads(path.read_text())["runs"] if path.exists() else []
    for seed in range(seeds):
        for lie in (False, True):
            for method in METHODS:
                words = words_of(method, seed, lie)
                if any(one["words"] == words for one in found):
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    ended = run(words, Path(scratch) / "run")
                liars = sorted(hostile_clients(HOSTILE, CLIENTS, seed)) if lie else []
                about = {"method": method, "lie": lie, "seed": seed, "words": words}
                found.append({**about, "liars": liars, **ended})
                save(path, {"runs": found})
                print(f"{method} seed {seed} lie {lie}: {len(ended['named'])} named", flush=True)


def _scores(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Return the largest z of each alarm: of liars in runs that have some, else of everybody."""
    return [
        max(one["z"].values())
        for run in runs
        for one in run["named"]
        if not run["liars"] or one["client"] in run["liars"]
    ]


def markdown(path: Path) -> str:
    """Return the stored counts: alarms of replies, of these for the update, the median z."""
    stored = json.loads(path.read_text())["runs"]
    lines = [
        "| method | nobody hostile: replies named | for the update | first round | z: median, most "
        "| two hostile: lies named | z: median, most | honest replies named |",
        "|---" * 8 + "|",
    ]
    for method in METHODS:
        honest, lied = (
            [one for one in stored if one["method"] == method and one["lie"] is lie]
            for lie in (False, True)
        )
        cells = [_TITLES[method], *_of_honest(honest), *_of_liars(lied)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _of_honest(runs: Sequence[dict[str, Any]]) -> list[str]:
    alarms = [one for run in runs for one in run["named"]]
    replies = sum(sum(run["replies"].values()) for run in runs)
    updates = sum("update" in one["z"] for one in alarms)
    first = str(min(one["round"] for one in alarms)) if alarms else ""
    return [f"{len(alarms)} of {replies}", str(updates), first, _spread(_scores(runs))]


def _of_liars(runs: Sequence[dict[str, Any]]) -> list[str]:
    lies = sum(run["replies"].get(str(client), 0) for run in runs for client in run["liars"])
    others = sum(sum(run["replies"].values()) for run in runs) - lies
    scores = _scores(runs)
    alarms = sum(len(run["named"]) for run in runs)
    return [f"{len(scores)} of {lies}", _spread(scores), f"{alarms - len(scores)} of {others}"]


def _spread(scores: Sequence[float]) -> str:
    return f"{statistics.median(scores):.0f}, {max(scores):.0f}" if scores else ""
