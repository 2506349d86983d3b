"""Seconds from the command to the end of round 1, and what a round costs when training is trivial.

First how long `fedhet --help`, and `fedhet` as it is (digits, 30 rounds) beside `import torch`,
take from start to end, and a sweep over six seeds beside its six runs one after the other.

    python -m benchmarks start [--runtimes local flower] [--clients 100 1000] [--repeats 5]

The work: FedAvg on scikit-learn's digits, an MLP, 10 of N clients a round, one step on 8 examples
each, no evaluation, no checkpoint, so that the engine's own time remains. The steady cost of a
round is the median time from the end of one round to the end of the next, without the first ten.
"""

from __future__ import annotations

import os
import statistics
from functools import partial

from benchmarks.harness import (
    FOLDER,
    in_turns,
    options_of,
    save,
    spread,
    timed_command,
    timed_run,
)

SEEDS = range(6)
SAMPLED, WARM = 10, 10
RECIPE = [
    "task=digits",
    "task.model=mlp",
    "partition=iid",
    "local.epochs=null",
    "local.steps=1",
    "local.batch_size=8",
    "evaluation.every=0",
    "checkpoint.every=0",
]


def six_runs() -> float:
    """Return how many seconds the runs of the sweep take one after the other."""
    return sum(timed_command([f"seed={seed}"]) for seed in SEEDS)


def commands(repeats: int) -> dict[str, object]:
    """Return the seconds of a default run and of a sweep, in turns with what they are held to."""
    torch = partial(timed_command, ["-c", "import torch"], "python")
    sweep = partial(timed_command, ["-m", f"seed={','.join(map(str, SEEDS))}"])
    found = in_turns(torch, {"fedhet": partial(timed_command, [])}, repeats)
    found |= in_turns(six_runs, {"fedhet -m": sweep}, max(repeats // 2, 1))
    for (command, one), base in zip(found.items(), ("import torch", "its six runs"), strict=True):
        seconds, ratios = spread(one["seconds"], ".2f"), spread(one["ratios"], ".2f")
        load = os.getloadavg()[0]
        print(f"{command}: {seconds} s, {ratios} times {base}; load {load:.0f}")
    return {**found, "load": os.getloadavg()[0]}


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__, "start", repeats=5)
    parser.add_argument("--runtimes", nargs="*", default=["local", "flower"])
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    seconds = [timed_command(["--help"]) for _ in range(options.repeats)]
    print(f"fedhet --help: {spread(seconds, '.2f')} s")
    save(options.out, commands(options.repeats))
    for runtime in options.runtimes:
        result: dict[str, object] = {"rounds": options.rounds}
        for clients in options.clients:
            words = [f"clients={clients}", f"participation={SAMPLED / clients}"]
            words += [*RECIPE, f"rounds={options.rounds}", f"runtime={runtime}"]
            runs = [timed_run(words) for _ in range(options.repeats)]
            first = [run["seconds_to_round_1"] for run in runs]
            steady = [statistics.median(run["seconds"][WARM:]) for run in runs]
            result[f"{clients} clients"] = {"seconds_to_round_1": first, "seconds": steady}
            print(
                f"{runtime} {clients} clients: round 1 after {spread(first, '.2f')} s, "
                f"then {spread([1e3 * s for s in steady], '.1f')} ms a round"
            )
        save(FOLDER / f"start_{runtime}.json", result)
