"""Seconds per round beside a plain PyTorch loop that does the same work in the same run.

    FEDHET_DATA=... python benchmarks/floor.py [--runtime local] [--rounds 20] [--repeats 3]

The work: FedAvg on MNIST, 100 IID clients x 600 examples, 10 a round, 1 epoch, batch 32, SGD .01,
the 582,026-parameter CNN, no evaluation. The plain loop: 2 forked processes x 1 thread that share
the decoded, normalised data and the global model in memory, nothing of Flower or of ours in the
round. The tuned loop: the same with channels_last and with ``keep_freed_memory``, which a plain
script lacks. The loops and ``fedhet`` take turns (loops, ours, loops, ours, ..., loops), and a
ratio is of our run over the mean of its two neighbours, so that a drift of the machine's speed
cancels.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.device import keep_freed_memory

ROOT = Path(__file__).resolve().parents[1]
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
    import io

    import pyarrow.parquet as parquet
    from PIL import Image

    table = parquet.read_table(Path(os.environ["FEDHET_DATA"]) / "mnist" / "train.parquet")
    images = [
        np.asarray(Image.open(io.BytesIO(cell["bytes"]))) for cell in table["image"].to_pylist()
    ]
    pixels = torch.from_numpy(np.stack(images))[:, None].float().div_(255)
    return (pixels - 0.1307) / 0.3081, torch.tensor(table["label"].to_pylist())


def plain_cnn(tuned: bool) -> nn.Module:
    """Return the same network in PyTorch's own words (582,026 parameters)."""
    layers = [nn.Conv2d(1, 32, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    assert sum(p.numel() for p in model.parameters()) == 582_026
    return model.to(memory_format=torch.channels_last) if tuned else model


def plain_worker(
    pipe, images: Tensor, labels: Tensor, shared: list[Tensor], sums: list[Tensor], tuned: bool
) -> None:
    """Train the client slices that come through the pipe; leave the sum of the models."""
    torch.set_num_threads(1)
    if tuned:
        keep_freed_memory()
    model = plain_cnn(tuned)
    params = list(model.parameters())
    while (slices := pipe.recv()) is not None:
        for total in sums:
            total.zero_()
        for indices in slices:
            with torch.no_grad():
                for param, value in zip(params, shared, strict=True):
                    param.copy_(value)
            optimizer = torch.optim.SGD(params, lr=LR)
            for chosen in indices[torch.randperm(len(indices))].split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
                optimizer.step()
            with torch.no_grad():
                for total, param in zip(sums, params, strict=True):
                    total.add_(param)
        pipe.send("done")


def plain_loop(images: Tensor, labels: Tensor, rounds: int, tuned: bool) -> list[float]:
    """Return the seconds of each round of the plain or the tuned loop."""
    context = mp.get_context("fork")
    shared = [p.detach().clone().share_memory_() for p in plain_cnn(tuned).parameters()]
    sums = [[torch.zeros_like(p).share_memory_() for p in shared] for _ in range(WORKERS)]
    pipes, workers = [], []
    for total in sums:
        near, far = context.Pipe()
        worker = context.Process(
            target=plain_worker, args=(far, images, labels, shared, total, tuned), daemon=True
        )
        worker.start()
        pipes.append(near)
        workers.append(worker)
    split = torch.randperm(len(labels)).view(CLIENTS, -1)
    generator, seconds = np.random.default_rng(SEED), []
    for _ in range(rounds):
        began = time.perf_counter()
        cohort = generator.choice(CLIENTS, PER_ROUND, replace=False)
        for i, pipe in enumerate(pipes):
            pipe.send([split[client] for client in cohort[i::WORKERS]])
        for pipe in pipes:
            pipe.recv()
        for position, value in enumerate(shared):
            value.copy_(sum(total[position] for total in sums) / PER_ROUND)
        seconds.append(time.perf_counter() - began)
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send(None)
        worker.join()
    return seconds


class PeakMemory:
    """Peak PSS of a process and its descendants, sampled every three seconds.

    For a sample the kernel walks through all pages of all processes, and stops them meanwhile.
    """

    def __init__(self, pid: int) -> None:
        self.process, self.peak_bytes, self.stop = psutil.Process(pid), 0, threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()

    def _sample(self) -> None:
        while not self.stop.wait(3.0):
            total = 0
            try:
                for process in [self.process, *self.process.children(recursive=True)]:
                    total += process.memory_full_info().pss
            except psutil.Error:
                continue  # a process ended while it was read
            self.peak_bytes = max(self.peak_bytes, total)


def timed_run(words: list[str]) -> dict:
    """Run ``fedhet``; return its seconds per round, time to round 1 and peak PSS."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "run"
        fedhet = str(Path(sys.executable).with_name("fedhet"))
        command = [fedhet, *words, f"results_dir={results}"]
        began, first = time.perf_counter(), None
        with open(Path(folder) / "out.txt", "w+") as out:
            process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
            memory = PeakMemory(process.pid)
            metrics = results / "metrics.jsonl"
            while process.poll() is None:
                if first is None and metrics.exists() and '"round": 1,' in metrics.read_text():
                    first = time.perf_counter() - began
                time.sleep(0.02)
            memory.stop.set()
            if process.returncode:
                out.seek(0)
                raise SystemExit(f"fedhet failed:\n{out.read()}")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()[:-1]]
        summary = json.loads((results / "summary.json").read_text())
        return {
            "seconds": [b["elapsed_seconds"] - a["elapsed_seconds"] for a, b in pairwise(rows)],
            "seconds_to_round_1": first,
            "wall_seconds": time.perf_counter() - began,
            "peak_pss_bytes": memory.peak_bytes,
            "accuracy": summary["accuracy"],
        }


def steady(seconds: list[float]) -> float:
    """Return the median without the first rounds, in which workers and allocators warm up."""
    return statistics.median(seconds[2:])


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime", default="local", choices=["local", "ray", "flower"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="default: benchmarks/floor_RUNTIME.json")
    options = parser.parse_args()
    out = options.out or ROOT / "benchmarks" / f"floor_{options.runtime}.json"
    if "FEDHET_DATA" not in os.environ:
        raise SystemExit("set FEDHET_DATA to the folder that holds mnist/train.parquet")
    images, labels = decoded_mnist()

    def loops() -> dict[str, float]:
        return {
            name: steady(plain_loop(images, labels, options.rounds, name == "tuned"))
            for name in ("plain", "tuned")
        }

    beside, ours = [loops()], []
    for _ in range(options.repeats):
        run = timed_run([*RECIPE, f"runtime={options.runtime}", f"rounds={options.rounds}"])
        beside.append(loops())
        run["seconds_per_round"] = steady(run["seconds"])
        for name in ("plain", "tuned"):
            mean = (beside[-2][name] + beside[-1][name]) / 2
            run[f"ratio_to_{name}"] = run["seconds_per_round"] / mean
        ours.append(run)
        print(
            f"plain {beside[-1]['plain']:.3f}, tuned {beside[-1]['tuned']:.3f}, fedhet "
            f"{run['seconds_per_round']:.3f} s/round   ratio to plain {run['ratio_to_plain']:.3f}, "
            f"to tuned {run['ratio_to_tuned']:.3f}   round 1 after "
            f"{run['seconds_to_round_1']:.1f} s   peak PSS {run['peak_pss_bytes'] / 1e9:.2f} GB   "
            f"accuracy {run['accuracy']:.4f}",
            flush=True,
        )
    result = {
        "runtime": options.runtime,
        "ratio_to_plain": statistics.median(run["ratio_to_plain"] for run in ours),
        "ratio_to_tuned": statistics.median(run["ratio_to_tuned"] for run in ours),
        "loops_seconds_per_round": beside,
        "fedhet": ours,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"median ratio to plain {result['ratio_to_plain']:.3f}, to tuned "
        f"{result['ratio_to_tuned']:.3f}; written to {out}"
    )


if __name__ == "__main__":
    main()
