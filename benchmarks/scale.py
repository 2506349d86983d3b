"""Large cohorts and populations by runtime=local: memory, the server's time, and a plain loop.

    python -m benchmarks scale cohorts [--cohorts 10 160 1000] [--rounds 2] [--batch 32]
        [--steps 1] [--every 1] [--repeats 1]
    python -m benchmarks scale population [--clients 1000 100000] [--rounds 1000]
    python -m benchmarks scale sums

cohorts     ResNet-18 with GroupNorm (11 million parameters) on noise of CIFAR-10's shape; 1,000
            clients with 50 images each, a checkpoint every so many rounds; of 1,000 one round. The
            loop trains as many of these clients on the same network, channels_last, in 2 processes
            with our allocator, and keeps a running sum. Loop and run take turns; the ratio is that
            of their rounds' medians, to the mean of the two loops beside a run.
population  FedAvg on task=synthetic, 100 clients a round, one step each, no evaluation but the
            last.
sums        CPU time of adding an update of ResNet-18 to the exact sum, norms included, and to one
            in float32.

Each line that is printed replaces its own entry of scale.json.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.floor import loop
from benchmarks.harness import in_turns, options_of, save, spread, timed_run
from fedhet.client_app.runtime import ClientRuntime
from fedhet.conf import compose_overrides
from fedhet.strategies.round.exact_sum import COARSE, ExactSum

CLIENTS, LR, EXAMPLES = 1000, 0.01, 50
STEP = ["strategy=fedavg", "local.epochs=null", "local.steps=1", "evaluation.every=0"]
NOISE = [
    "task=own",
    "task.name=cifar10_noise",
    "task.model=resnet18_gn",
    "task.input_shape=[3,32,32]",
    "task.num_classes=10",
    "task.data=benchmarks.scale:noise",
    "task.test_data=benchmarks.scale:test_noise",
]
Images = tuple[np.ndarray, np.ndarray]


def noise(client_id: int, seed: int) -> tuple[Images, None]:
    """Return a client's images of noise (50, 3, 32, 32) and labels."""
    generator = np.random.default_rng([seed, client_id])
    images = generator.standard_normal((EXAMPLES, 3, 32, 32), dtype=np.float32)
    return (images, generator.integers(0, 10, EXAMPLES)), None


def test_noise(seed: int) -> Images:
    """Return the server's images of noise."""
    return noise(CLIENTS, seed)[0]


class PlainSGD:
    """Steps of plain SGD on a client's examples, on the network that a run's clients have."""

    def __init__(self, words: list[str], batch: int = 1, steps: int = 1) -> None:
        torch.set_num_threads(1)  # before the fork
        self.batch, self.steps = batch, steps
        self.runtime = ClientRuntime(compose_overrides(tuple(words)), "cpu", 0, None)
        self.params = list(self.runtime.model.parameters())

    def train(self, client: int) -> None:
        """Train from the present ``params`` on, in place."""
        data, _ = self.runtime.client_data(client, None)
        order = torch.Generator().manual_seed(client)
        epochs = (data.batches(self.batch, generator=order, train=True) for _ in range(self.steps))
        optimizer = torch.optim.SGD(self.params, lr=LR)
        for inputs, labels in itertools.islice(itertools.chain.from_iterable(epochs), self.steps):
            optimizer.zero_grad()
            F.cross_entropy(self.runtime.model(inputs)[1], labels).backward()
            optimizer.step()


def cohorts(
    sizes: list[int], rounds: int, batch: int, steps: int, every: int, repeats: int
) -> dict[str, Any]:
    """Return memory and times of each size of cohort, in turns with those of the loop."""
    result: dict[str, Any] = {}
    words = [*NOISE, *STEP, f"clients={CLIENTS}", "runtime=local", "device=cpu"]
    words += [f"local.batch_size={batch}", f"local.lr={LR}", f"local.steps={steps}"]
    words.append(f"checkpoint.every={every}")
    for size in sizes:
        taken, runs = rounds if size < CLIENTS else 1, list[dict[str, Any]]()

        def plain(size: int = size, taken: int = taken) -> float:
            make = partial(PlainSGD, words, batch, steps)
            return statistics.median(loop(make, CLIENTS, size, taken))

        def ours(size: int = size, taken: int = taken, runs: list[Any] = runs) -> float:
            more = [f"participation={size / CLIENTS}", f"rounds={taken}"]
            runs.append(timed_run([*words, *more]))
            return statistics.median(runs[-1]["seconds"])

        found = in_turns(plain, {"fedhet": ours}, repeats)["fedhet"]
        rows = [row for run in runs for row in run["rows"] if row["round"] > 0]
        cpu = [seconds / size for run in runs for seconds in run["server_cpu_seconds"]]
        peak, load = max(run["peak_pss_bytes"] for run in runs), os.getloadavg()[0]
        result[f"{size} clients, {steps} steps of {batch}, checkpoint.every={every}"] = {
            **found,
            "peak_pss_bytes": peak,
            "server_seconds_a_client": [row["server_seconds"] / size for row in rows],
            "server_cpu_seconds_a_client": cpu,
            "load": load,
        }
        print(
            f"{size} clients: peak PSS {peak / 1e9:.2f} GB; server "
            f"{spread([1e3 * one for one in cpu], '.1f')} ms CPU a client; "
            f"{spread(found['seconds'], '.2f')} s a round, {spread(found['ratios'], '.2f')} times "
            f"the loop; load {load:.0f}"
        )
    return result


def population(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Return start, memory and round times of each number of clients."""
    result: dict[str, Any] = {}
    for number in sizes:
        words = ["task=synthetic", *STEP, "runtime=local", f"clients={number}"]
        words += [f"participation={100 / number}", f"rounds={rounds}", "checkpoint.every=100"]
        run = timed_run(words)
        seconds, tenth = [1e3 * one for one in run["seconds"]], max(1, rounds // 10)
        result[f"{number} clients"] = {
            "rounds": rounds,
            "seconds_to_round_1": run["seconds_to_round_1"],
            "peak_pss_bytes": run["peak_pss_bytes"],
            "milliseconds_of_tenths": [
                statistics.median(seconds[at : at + tenth]) for at in range(0, rounds, tenth)
            ],
            "load": os.getloadavg()[0],
        }
        print(
            f"{number} clients: round 1 after {run['seconds_to_round_1']:.1f} s, peak PSS "
            f"{run['peak_pss_bytes'] / 1e9:.2f} GB, {spread(seconds[1:], '.0f')} ms a round; "
            f"first tenth {statistics.median(seconds[1:tenth]):.0f}, "
            f"last {statistics.median(seconds[-tenth:]):.0f}; load {os.getloadavg()[0]:.0f}"
        )
    return result


def sums(repeats: int) -> dict[str, Any]:
    """Return the CPU seconds of adding an update, exactly and in float32, in turns."""
    model = PlainSGD([*NOISE, *STEP, "clients=1"]).runtime.model
    update = {n: 1e-3 * torch.randn_like(p.detach()) for n, p in model.named_parameters()}
    plain = {name: torch.zeros_like(value) for name, value in update.items()}
    exact = ExactSum(COARSE)

    def add() -> None:
        for name, value in plain.items():
            value.add_(update[name], alpha=50.0)

    def timed(work: Callable[[], None]) -> float:
        began = time.thread_time()
        work()
        return time.thread_time() - began

    work = partial(timed, partial(exact.add, update, 50.0))
    found = in_turns(partial(timed, add), {"exact": work}, repeats)["exact"]
    numbers = sum(value.numel() for value in update.values())
    print(
        f"{numbers} numbers: {spread([1e3 * one for one in found['seconds']], '.1f')} ms, "
        f"{spread(found['ratios'], '.1f')} times a float32 sum; load {os.getloadavg()[0]:.0f}"
    )
    return {"numbers": numbers, **found, "load": os.getloadavg()[0]}


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__, "scale", repeats=0)
    parser.add_argument("part", choices=["cohorts", "population", "sums"])
    parser.add_argument("--cohorts", nargs="+", type=int, default=[10, 160, CLIENTS])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="rounds from checkpoint to checkpoint")
    parser.add_argument("--clients", nargs="+", type=int, default=[CLIENTS, 100_000])
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "cohorts": lambda: cohorts(
            options.cohorts,
            options.rounds or 2,
            options.batch,
            options.steps,
            options.every,
            options.repeats or 1,
        ),
        "population": lambda: population(options.clients, options.rounds or 1000),
        "sums": lambda: sums(options.repeats or 20),
    }
    found = parts[options.part]()
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    save(options.out, {**before, options.part: {**before.get(options.part, {}), **found}})
