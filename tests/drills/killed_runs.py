"""Kills runs at random moments, resumes them, and compares their ends with an undisturbed run's.

``python -m tests.drills.killed_runs 20`` kills each run of ``RUNS`` 20 times, below /tmp.
"""

import contextlib
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

from fedhet.common.results import read_rows
from fedhet.runtimes.local.worker import set_identity
from tests.processes import Fork, alive, finish, read_until, summary_of
from tests.recipes import TINY, run_recipe

_CLIENTS = 8
_WORDS = [*TINY, f"clients={_CLIENTS}", "participation=0.5", "local.epochs=1", "local.lr=0.02"]
# State at the clients: control variates, and what was left out of each reply.
_SMALL = [*_WORDS, "strategy/compression=top_k", "strategy.compression.down=int8"]
_SLOW = ["system=lognormal", "system.sigma=1.8", "system.dropout=0.1"]
RUNS = {
    "compressed": [*_SMALL, "strategy=scaffold"],
    "asynchronous": [*_WORDS, "strategy=[scaffold,fedbuff]", *_SLOW],
    "asynchronous and compressed": [*_SMALL, "strategy=[scaffold,fedbuff]", *_SLOW],
}
SAME = ("parameters_sha256", "rounds", "bytes_up", "bytes_down", "failures", "accuracy")
_COLUMNS = ("round", "accuracy", "clients", "simulated_seconds", "max_staleness")
_MOMENT = 0.1  # seconds after a round's end in which a run is killed


def run_with_kills(folder: Path, words: list[str], rounds: int, kills: int, seed: int) -> list[int]:
    """Run to the end, killed so many times; return after which rounds.

    All processes of the run are killed at once, as by a power cut.
    """
    rng = random.Random(seed)
    whole = run_recipe(folder / "whole", *words, f"rounds={rounds}", clients=_CLIENTS)
    run = folder / "run"
    words = [*words, "runtime=local", f"rounds={rounds}", f"results_dir={run}"]
    after = sorted(rng.sample(range(1, rounds - 1), kills))
    for round in after:
        again = ["resume=true"] if run.exists() else []
        with Fork(folder, *words, *again) as launch:
            read_until(launch, f"round {round:3}/")
            time.sleep(rng.uniform(0.0, _MOMENT))
            _kill(launch)
    code, output = finish(Fork(folder, *words, "resume=true"))
    assert code == 0, output
    found = summary_of(run)
    assert {key: found[key] for key in SAME} == {key: whole[key] for key in SAME}
    rows = [read_rows(one / "metrics.jsonl") for one in (run, folder / "whole")]
    kept = [[{key: row.get(key) for key in _COLUMNS} for row in part] for part in rows]
    assert kept[0] == kept[1]
    return after


def _kill(launch: Fork) -> None:
    assert launch.poll() is None, "the run has ended before it was killed"
    started = psutil.Process(launch.pid).children(recursive=True)
    launch.kill()
    for process in started:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(started, timeout=20)
    assert alive(started) == []


def main(kills: int, rounds: int, seed: int) -> None:
    """Kill every run; print a line for each."""
    set_identity()
    for name, words in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            after = run_with_kills(Path(folder), words, rounds, kills, seed)
            seconds = time.monotonic() - began
            print(
                f"{name}: the same bits after {kills} kills, in rounds {after} ({seconds:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main(int(sys.argv[1]), rounds=40, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
