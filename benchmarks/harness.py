"""What the measurements share: turns, medians, timed runs of ``fedhet``, results as JSON."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch

from fedhet.common.results import METRICS, SUMMARY, ResultsFollower, read_rows

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"


def options_of(text: str | None, name: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every measurement."""
    parser = argparse.ArgumentParser(description=(text or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, default=FOLDER / f"{name}.json", help="a JSON file")
    return parser


def in_turns(
    base: Callable[[], float], others: dict[str, Callable[[], float]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure base, other, base, other, ..., base; return seconds and ratios by name.

    A ratio is over the mean of the two neighbouring bases, so that a drift of the machine's speed
    cancels. The order of the others rotates.
    """
    found: dict[str, dict[str, Any]] = {n: {"seconds": [], "ratios": []} for n in others}
    names, before = list(others), base()
    for repeat in range(repeats):
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            seconds, after = others[name](), base()
            found[name]["seconds"].append(seconds)
            found[name]["ratios"].append(2 * seconds / (before + after))
            before = after
    return found


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the median and the range as text."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def save(path: Path, result: dict[str, Any]) -> None:
    """Write a result, with the machine it was measured on."""
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    about = {"machine": machine, "torch": torch.__version__, "began": time.strftime("%Y-%m-%d")}
    path.write_text(json.dumps({**result, **about}, indent=1) + "\n")
    print(f"written to {path}")


def run_fedhet(words: Sequence[str], folder: Path) -> None:
    """Run the command; its output is printed if it fails."""
    command = [str(Path(sys.executable).with_name("fedhet")), *words, f"results_dir={folder}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # before Opacus's package named benchmarks
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)


def timed_command(words: Sequence[str], program: str = "fedhet") -> float:
    """Return how many seconds a program takes from start to end, in a folder of its own."""
    command = [str(Path(sys.executable).with_name(program)), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        subprocess.run(command, cwd=scratch, env=env, stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - began


def timed_run(words: Sequence[str], look_seconds: float = 3.0) -> dict[str, Any]:
    """Run ``fedhet``; return its rows, seconds of each round and to round 1, and peak memory.

    Memory is looked at every ``look_seconds``: the kernel stops the processes meanwhile.
    ``server_cpu_seconds`` are those of the server's process in each round, evaluation included.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        began, first, peak, next_look = time.perf_counter(), 0.0, 0, 0.0
        follower, server, cpu = ResultsFollower(folder), None, list[float]()
        thread = threading.Thread(target=run_fedhet, args=(words, folder), daemon=True)
        thread.start()
        while thread.is_alive():
            seconds = time.perf_counter() - began
            for row in follower.new_rows():
                server = server or _server()
                cpu.append(_cpu_seconds(server))
                first = seconds if row["round"] == 1 else first
            if seconds >= next_look:
                peak, next_look = max(peak, _pss_of_children()), seconds + look_seconds
            time.sleep(0.02)
        path = folder / SUMMARY
        summary = json.loads(path.read_text()) if path.exists() else {"status": "failed"}
        if summary["status"] != "completed":
            raise SystemExit(f"fedhet {' '.join(words)} has failed")
        rows = read_rows(folder / METRICS)
    return {
        "rows": rows,
        "seconds": [b["elapsed_seconds"] - a["elapsed_seconds"] for a, b in pairwise(rows)],
        "seconds_to_round_1": first,
        "server_cpu_seconds": [after - before for before, after in pairwise(cpu)],
        "peak_pss_bytes": peak,
        "accuracy": summary.get("accuracy"),
    }


def _server() -> psutil.Process:
    """Return the server's process: the child of the launcher that has the workers."""
    found = [child for one in psutil.Process().children() for child in one.children()]
    return max(found, key=lambda child: len(child.children()))


def _cpu_seconds(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return math.nan  # it has ended


def _pss_of_children() -> int:
    try:
        children = psutil.Process().children(recursive=True)
        return sum(process.memory_full_info().pss for process in children)
    except psutil.Error:
        return 0  # a process ended while it was read
