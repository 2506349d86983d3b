"""Seconds from the command to the end of round 1, and what a round costs when training is trivial.

    python benchmarks/start.py [--runtimes local flower] [--repeats 5]

The work: FedAvg on scikit-learn's digits, an MLP, 10 of N clients a round, one step on 8 examples
each, no evaluation, no checkpoint, so that what remains is the engine. N is 100 and 1000. The
steady cost of a round is the median time from the end of one round to the end of the next, without
the first ten.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics

from floor import ROOT, timed_run

SAMPLED, WARM = 10, 10


def recipe(clients: int, runtime: str, rounds: int) -> list[str]:
    """Return the words of the trivial run."""
    return [
        "task=digits",
        "task.model=mlp",
        "partition=iid",
        f"clients={clients}",
        f"participation={SAMPLED / clients}",
        "local.epochs=null",
        "local.steps=1",
        "local.batch_size=8",
        "evaluation.every=0",
        "checkpoint.every=0",
        f"rounds={rounds}",
        f"runtime={runtime}",
    ]


def measure(clients: int, runtime: str, rounds: int) -> dict[str, float]:
    """Return the seconds to the end of round 1 and of a steady round, and the peak memory."""
    run = timed_run(recipe(clients, runtime, rounds))
    return {
        "seconds_to_round_1": run["seconds_to_round_1"],
        "seconds_per_round": statistics.median(run["seconds"][WARM:]),
        "peak_pss_bytes": run["peak_pss_bytes"],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtimes", nargs="+", default=["local", "flower"])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for runtime in options.runtimes:
        result: dict[str, object] = {
            "rounds": options.rounds,
            "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        }
        for clients in options.clients:
            runs = [measure(clients, runtime, options.rounds) for _ in range(options.repeats)]
            result[f"{clients} clients"] = runs
            show(runtime, clients, runs)
        out = ROOT / "benchmarks" / f"start_{runtime}.json"
        out.write_text(json.dumps(result, indent=1) + "\n")


def show(runtime: str, clients: int, runs: list[dict[str, float]]) -> None:
    """Print medians and ranges."""
    first = sorted(run["seconds_to_round_1"] for run in runs)
    steady = sorted(1e3 * run["seconds_per_round"] for run in runs)
    print(
        f"{runtime:>7} {clients:>5} clients: round 1 after {statistics.median(first):.2f} s "
        f"({first[0]:.2f} to {first[-1]:.2f}), then {statistics.median(steady):.1f} ms a round "
        f"({steady[0]:.1f} to {steady[-1]:.1f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
