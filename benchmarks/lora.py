"""LoRA's methods beside FedAvg on the same adapters: does an exact mean of B A help?

    python -m benchmarks lora

Digits, each read as eight rows by a transformer of two blocks with random weights, which stay; its
adapters (r = 4) and classifier are trained. Four clients, Dirichlet(0.3), 8 rounds of 2 epochs.

The rule, fixed before the first run: each method has the step size of GRID with the best figure on
seed 100, and its figure is compared with FedAvg's on seeds 0, 1 and 2: the mean of the paired
differences and its 95 % interval (Student's t, two degrees of freedom). The figure is the mean of
the last three rounds' accuracy: of the global model; and for FedSA-LoRA of the clients' own models
on their own classes (``personal_accuracy``), against that of FedAvg's clients after training.
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import options_of, save
from fedhet import launch
from fedhet.common.results import METRICS, SUMMARY, read_rows

METHODS = ("fedavg", "ffa_lora", "flora", "fedex_lora", "fedsa_lora")
GRID, TUNED_ON, SEEDS, LAST = (0.01, 0.03), 100, (0, 1, 2), 3
STUDENT = 4.303  # of two degrees of freedom, 97.5 %
WORDS = (
    *("task=digits", "task.model=benchmarks.lora:rows_transformer", "clients=4", "rounds=8"),
    "task.lora={r:4,alpha:8,target_modules:[q,k,v,out,up,down]}",
    *("partition=dirichlet", "partition.alpha=0.3", "local=adam", "local.epochs=2"),
    *("local.batch_size=32", "evaluation.model=both", "runtime=local"),
)


class AttentionBlock(nn.Module):
    """Attention and an MLP on tokens (B, T, d)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return tokens (B, T, d)."""
        given = self.first(tokens)
        parts = (layer(given).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        seen = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        tokens = tokens + self.out(seen)
        mixed: Tensor = tokens + self.down(nn.functional.gelu(self.up(self.second(tokens))))
        return mixed


class RowsTransformer(nn.Module):
    """Classifies images (B, 1, T, T) whose rows are the tokens."""

    def __init__(self, size: int, num_classes: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Linear(size, width)
        self.place = nn.Parameter(torch.randn(size, width))
        self.blocks = nn.Sequential(*(AttentionBlock(width, 4) for _ in range(blocks)))
        self.classes = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, C)."""
        tokens = self.blocks(self.embed(images.squeeze(1)) + self.place)
        logits: Tensor = self.classes(tokens.mean(1))
        return logits


def rows_transformer(num_classes: int = 10, width: int = 32, blocks: int = 2) -> nn.Module:
    """Return the model."""
    return RowsTransformer(8, num_classes, width, blocks)


def run(method: str, lr: float, seed: int) -> dict[str, Any]:
    """Return a run's figures, and its bytes a client and round."""
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(io.StringIO()):
        folder = Path(scratch) / "run"
        words = (f"strategy={method}", f"local.lr={lr}", f"seed={seed}", f"results_dir={folder}")
        sys.argv[:] = ["fedhet", *WORDS, *words]
        try:
            launch.main()
        except SystemExit as end:
            if end.code:
                raise
        rows = read_rows(folder / METRICS)[-LAST:]
        summary = json.loads((folder / SUMMARY).read_text())
    found: dict[str, Any] = {"method": method, "lr": lr, "seed": seed}
    for name in ("accuracy", "personal_accuracy"):
        if name in rows[-1]:
            found[name] = statistics.fmean(row[name] for row in rows)
    return found | {way: summary[way] / 32 for way in ("bytes_up", "bytes_down")}


def compared(runs: list[dict[str, Any]], method: str, figure: str) -> dict[str, float]:
    """Return a method's mean figure, and its paired difference from FedAvg's with the interval."""
    own, base = ([one[figure] for one in runs if one["method"] == m] for m in (method, "fedavg"))
    differences = [a - b for a, b in zip(own, base, strict=True)]
    half = STUDENT * statistics.stdev(differences) / len(differences) ** 0.5
    return {"mean": statistics.fmean(own), "difference": statistics.fmean(differences), "±": half}


def main() -> None:
    """Tune, run, compare, write."""
    options = options_of(__doc__, "lora", 1).parse_args()
    tuned, runs = [], []
    for method in METHODS:
        figure = "personal_accuracy" if method == "fedsa_lora" else "accuracy"
        tried = [run(method, lr, TUNED_ON) for lr in GRID]
        tuned += tried
        best = max(tried, key=lambda one: one[figure])["lr"]
        runs += [run(method, best, seed) for seed in SEEDS]
        print(method, best, [one[figure] for one in runs[-len(SEEDS) :]], flush=True)
    found = {
        method: compared(runs, method, figure)
        for method, figure in ((m, "accuracy") for m in METHODS[1:4])
    }
    found["fedsa_lora"] = compared(runs, "fedsa_lora", "personal_accuracy")
    save(options.out, {"words": WORDS, "tuned": tuned, "runs": runs, "compared": found})


if __name__ == "__main__":
    main()
