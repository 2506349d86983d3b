"""Seconds of the server's step of the one-shot methods beside the plain average's.

    FEDHET_DATA=... python -m benchmarks fusion [--clients 5 10] [--methods maecho pfnm] [WORD ...]

N clients train the paper's perceptron for an epoch on MNIST (without FEDHET_DATA: on digits), and
the server fuses the models. Measured is ``server_seconds`` of the one round, by runtime=local.
Further words go to every recipe.
"""

from __future__ import annotations

import os
from functools import partial

from benchmarks.harness import in_turns, options_of, save, spread, timed_run

RECIPE = ["task.model=mlp", "partition=iid", "rounds=1", "local.epochs=1", "runtime=local"]


def server_seconds(*words: str) -> float:
    """Return the seconds of the server's step of a run of one round."""
    return float(timed_run([*RECIPE, *words])["rows"][-1]["server_seconds"])


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__, "fusion", repeats=3)
    parser.add_argument("--clients", nargs="+", type=int, default=[5, 10, 20])
    parser.add_argument("--methods", nargs="+", default=["maecho", "otfusion", "pfnm", "regmean"])
    parser.add_argument("words", nargs="*", metavar="WORD")
    options = parser.parse_args()
    task = "task=mnist" if "FEDHET_DATA" in os.environ else "task=digits"
    result: dict[str, object] = {"task": task, "words": options.words}
    for clients in options.clients:
        words = [task, f"clients={clients}", *options.words]
        base = partial(server_seconds, *words, "strategy=average")
        others = {m: partial(server_seconds, *words, f"strategy={m}") for m in options.methods}
        found = in_turns(base, others, options.repeats)
        for method, figures in found.items():
            seconds, ratios = spread(figures["seconds"]), spread(figures["ratios"], ".1f")
            print(f"{clients} clients, {method}: {seconds} s, {ratios} times the average")
        result[f"{clients} clients"] = found
    save(options.out, result)
