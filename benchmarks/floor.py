"""Seconds per round beside a plain PyTorch loop that does the same work in the same run.

    FEDHET_DATA=... python -m benchmarks floor [--runtime local] [--rounds 20] [--repeats 3]

The work: FedAvg on MNIST, 100 IID clients x 600 examples, 10 a round, 1 epoch, batch 32, SGD .01,
the 582,026-parameter CNN, no evaluation. The loop: 2 forked processes x 1 thread that share the
decoded, normalised data and the global model in memory, nothing of Flower or of ours in the round.
It is tuned (channels_last, ``keep_freed_memory``); ``--plain`` leaves that out.
"""

from __future__ import annotations

import io
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import FOLDER, in_turns, options_of, save, spread, timed_run
from fedhet.tasks.device import keep_freed_memory

CLIENTS, PER_ROUND, BATCH, LR, WORKERS, SEED = 100, 10, 32, 0.01, 2, 0
RECIPE = [
    "task=mnist",
    "task.model=fedavg_cnn",
    "strategy=fedavg",
    "partition=iid",
    f"clients={CLIENTS}",
    f"participation={PER_ROUND / CLIENTS}",
    "local.epochs=1",
    f"local.batch_size={BATCH}",
    f"local.lr={LR}",
    f"seed={SEED}",
    "evaluation.every=0",
    "checkpoint.every=0",
]


def decoded_mnist() -> tuple[Tensor, Tensor]:
    """Return the training images, normalised (60000, 1, 28, 28), and labels, read by pyarrow."""
    import pyarrow.parquet as parquet
    from PIL import Image

    table = parquet.read_table(Path(os.environ["FEDHET_DATA"]) / "mnist" / "train.parquet")
    images = [
        np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in table["image"].to_pylist()
    ]
    pixels = torch.from_numpy(np.stack(images))[:, None].float().div_(255)
    return (pixels - 0.1307) / 0.3081, torch.tensor(table["label"].to_pylist())


def cnn(tuned: bool) -> nn.Module:
    """Return the same network in PyTorch's own words (582,026 parameters)."""
    layers = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    return model.to(memory_format=torch.channels_last) if tuned else model


class Trainer(Protocol):
    """Trains a client on a model, whose tensors it has."""

    params: list[Tensor]

    def train(self, client: int) -> None:
        """Train from the present ``params`` on, in place."""


class MnistTrainer:
    """An epoch of SGD on a client's images."""

    def __init__(self, data: tuple[Tensor, Tensor], tuned: bool) -> None:
        (self.images, self.labels), self.tuned, self.model = data, tuned, cnn(tuned)
        self.params: list[Tensor] = list(self.model.parameters())
        self.split = torch.randperm(len(self.labels)).view(CLIENTS, -1)

    def train(self, client: int) -> None:
        """Train from the present ``params`` on, in place."""
        optimizer, indices = torch.optim.SGD(self.params, lr=LR), self.split[client]
        for chosen in indices[torch.randperm(len(indices))].split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(self.model(self.images[chosen]), self.labels[chosen]).backward()
            optimizer.step()


def worker(
    pipe: Connection, trainer: Trainer, shared: list[Tensor], sums: list[Tensor], tuned: bool
) -> None:
    """Train the clients that come through the pipe; leave the sum of the models."""
    torch.set_num_threads(1)
    if tuned:
        keep_freed_memory()
    while (clients := pipe.recv()) is not None:
        for total in sums:
            total.zero_()
        for client in clients:
            with torch.no_grad():
                for param, value in zip(trainer.params, shared, strict=True):
                    param.copy_(value)
            trainer.train(client)
            with torch.no_grad():
                for total, param in zip(sums, trainer.params, strict=True):
                    total.add_(param)
        pipe.send("done")


def loop(
    make: Callable[[], Trainer], clients: int, per_round: int, rounds: int, tuned: bool = True
) -> list[float]:
    """Return the seconds of the plain loop's rounds."""
    context, trainer = mp.get_context("fork"), make()
    shared = [p.detach().clone().share_memory_() for p in trainer.params]
    sums = [[torch.zeros_like(p).share_memory_() for p in shared] for _ in range(WORKERS)]
    pipes, processes = [], []
    for total in sums:
        near, far = context.Pipe()
        args = (far, trainer, shared, total, tuned)
        processes.append(context.Process(target=worker, args=args, daemon=True))
        processes[-1].start()
        pipes.append(near)
    generator, seconds = np.random.default_rng(SEED), []
    for _ in range(rounds):
        began = time.perf_counter()
        cohort = generator.choice(clients, per_round, replace=False).tolist()
        for i, pipe in enumerate(pipes):
            pipe.send(cohort[i::WORKERS])
        for pipe in pipes:
            pipe.recv()
        for position, value in enumerate(shared):
            value.copy_(sum(total[position] for total in sums) / per_round)
        seconds.append(time.perf_counter() - began)
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join()
    return seconds


def steady(seconds: list[float]) -> float:
    """Return the median without the first rounds, in which workers and allocators warm up."""
    return statistics.median(seconds[2:])


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__, "floor", repeats=3)
    parser.add_argument("--runtime", default="local", choices=["local", "ray", "flower"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="a loop that is not tuned")
    parser.set_defaults(out=None)
    options = parser.parse_args()
    if "FEDHET_DATA" not in os.environ:
        raise SystemExit("set FEDHET_DATA to the folder that holds mnist/train.parquet")
    if options.rounds < 3:
        raise SystemExit(f"--rounds {options.rounds}: the first two are left out, so at least 3")
    runs: list[dict[str, Any]] = []

    def ours() -> float:
        words = [*RECIPE, f"runtime={options.runtime}", f"rounds={options.rounds}"]
        runs.append(timed_run(words))
        del runs[-1]["rows"]
        return steady(runs[-1]["seconds"])

    make = partial(MnistTrainer, decoded_mnist(), not options.plain)

    def base() -> float:
        return steady(loop(make, CLIENTS, PER_ROUND, options.rounds, not options.plain))

    found = in_turns(base, {"fedhet": ours}, options.repeats)["fedhet"]
    print(
        f"runtime={options.runtime}: {spread(found['seconds'])} s a round, "
        f"{spread(found['ratios'])} times the loop; "
        f"round 1 after {spread([run['seconds_to_round_1'] for run in runs], '.1f')} s; "
        f"peak PSS {max(run['peak_pss_bytes'] for run in runs) / 1e9:.2f} GB"
    )
    result = {"runtime": options.runtime, "tuned_loop": not options.plain, **found, "runs": runs}
    save(options.out or FOLDER / f"floor_{options.runtime}.json", result)
