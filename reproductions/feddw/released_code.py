"""Runs a clone of FedDW's released code, no line of it changed, on the CIFAR-10 of ``FEDHET_DATA``.

    python -m fedhet.reproductions.feddw.released_code CLONE --method FedDW --seed 0 --out released

Clone github.com/liuvvvvv1/FedDW. Its ``main.py`` sets no seed, loads images in worker
processes, downloads the data and opens a window in each round. Here the seed is set, images are
loaded in this process (with the bits that torchvision gives without workers), and each round is
written to a file. Everything else is as released, the random crops and flips of test images
included.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import random
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fedhet.common.files import save_text
from fedhet.common.results import (
    COMPLETED,
    CONFIG,
    METRICS,
    STOPPED,
    write_rows,
    write_summary,
)
from fedhet.reproductions.cifar10 import SIZE, read_cifar10
from fedhet.tasks.device import keep_freed_memory

METHODS = {"Fedavg": "FedAvg", "FedDW": "FedDW", "Per-Fedavg": "Per-FedAvg"}  # titles here
BORDER = 4  # pixels; this, and the following, of the clone's dataset.py
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
PATCHED = ("config", "dataset", "Updata", "utils", "torch.utils.data")
KERAS = ("keras", "keras.src", "keras.src.datasets", "keras.src.utils")  # imported for IMDB alone


class CroppedImages(Dataset[tuple[Tensor, Tensor]]):
    """CIFAR-10 after the clone's RandomCrop, RandomHorizontalFlip, ToTensor and Normalize.

    Attributes:
        targets: labels, (n,); the clone partitions by them.
    """

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.int64]) -> None:
        """Take images (n, 3, 32, 32) and their labels (n,)."""
        border = [(0, 0), (0, 0), (BORDER, BORDER), (BORDER, BORDER)]
        self._padded = np.pad(images, border)
        self.targets = labels

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.targets)

    def __getitems__(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch, (b, 3, 32, 32) and (b,)."""
        tops, lefts, mirrored = draw_crops(len(rows))
        cropped = np.empty((len(rows), 3, SIZE, SIZE), np.uint8)
        for place, (row, top, left) in enumerate(zip(rows, tops, lefts, strict=True)):
            cropped[place] = self._padded[row, :, top : top + SIZE, left : left + SIZE]
        cropped[mirrored] = cropped[mirrored, ..., ::-1]
        pixels = torch.from_numpy(cropped).float().div_(255)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
        return pixels.sub_(mean).div_(std), torch.from_numpy(self.targets[list(rows)])


def draw_crops(count: int) -> tuple[list[int], list[int], NDArray[np.bool_]]:
    """Return tops, lefts and who is mirrored, (n,) each.

    These are the numbers that torchvision draws for one image after the other, two images at once.
    """
    pairs = torch.empty(count // 2 * 3, dtype=torch.int64)
    drawn = pairs.random_(-(2**63), None).numpy().astype(">i8").view(">u4").reshape(-1, 3)
    positions = (drawn[:, :2] % (2 * BORDER + 1)).tolist()
    mirrored = (drawn[:, 2] & 0xFFFFFF < 2**23).tolist()  # a float has 24 bits
    if count % 2:
        positions.append(
            torch.cat([torch.randint(2 * BORDER + 1, (1,)) for _ in range(2)]).tolist()
        )
        mirrored.append(torch.rand(1).item() < 0.5)
    tops, lefts = zip(*positions, strict=True)
    return list(tops), list(lefts), np.array(mirrored)


class ClientImages(Dataset[tuple[Tensor, Tensor]]):
    """Some of the images, in place of the clone's ``Dataset_By_Client``."""

    def __init__(self, dataset: CroppedImages, rows: Sequence[int]) -> None:
        """Take all images and the rows of a client."""
        self._dataset, self._rows = dataset, [int(row) for row in rows]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._rows)

    def __getitems__(self, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a batch, (b, 3, 32, 32) and (b,)."""
        return self._dataset.__getitems__([self._rows[place] for place in places])


def read_images(folder: Path, split: str) -> CroppedImages:
    """Read ``folder/SPLIT.parquet``."""
    arrays = read_cifar10(folder, split)
    return CroppedImages(arrays.read(), arrays.labels)


def load_batches(dataset: Dataset[Any], batch_size: int, shuffle: bool, **_: object) -> Any:
    """Return a loader without worker processes, whose batches are made at once."""
    return DataLoader(dataset, batch_size, shuffle=shuffle, collate_fn=lambda batch: batch)


def settings_of(released: type, method: str, alpha: float, part: float, rounds: int) -> type:
    """Return the clone's ``Configs`` with the method and the setting of a run."""

    class Configs(released):  # type: ignore[misc]  # a class of the clone
        def __init__(self) -> None:
            super().__init__()
            self.name_method = method
            self.server_epoch, self.dirichlet_alpha = rounds, alpha
            self.participation_rate = part

    return Configs


def run(
    clone: Path, settings: Callable[[type], type], seed: int, done: Callable[[float], None]
) -> None:
    """Run the clone's ``main.py``; ``done`` takes the accuracy in % after each round."""
    data = Path(os.environ["FEDHET_DATA"]) / "cifar10"
    sys.path.insert(0, str(clone))
    for name in KERAS:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(imdb=None, pad_sequences=None)
    modules: list[Any] = [importlib.import_module(name) for name in PATCHED]
    config, dataset, local, tools, loading = modules
    config.Configs = settings(config.Configs)
    dataset.Load_Datasets = lambda name: (read_images(data, "train"), read_images(data, "test"))
    local.DataLoader = loading.DataLoader = load_batches
    local.Dataset_By_Client = tools.Dataset_By_Client = ClientImages
    tools.show_division_by_client = tools.show_accuracy_curve = lambda *_: None
    tools.show_accury_list = lambda accuracy, *_: done(accuracy)
    keep_freed_memory()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the clone draws from it
    torch.manual_seed(seed)
    runpy.run_path(str(clone / "main.py"), run_name="__main__")


def write_results(folder: Path, config: Mapping[str, Any], accuracies: Sequence[float]) -> None:
    """Write a results directory that ``fedhet-report`` reads; accuracies in %, one a round."""
    folder.mkdir(parents=True, exist_ok=True)
    save_text(folder / CONFIG, yaml.safe_dump(dict(config), sort_keys=False))
    rows = [{"round": n, "accuracy": value / 100} for n, value in enumerate(accuracies, 1)]
    write_rows(folder / METRICS, rows)
    status = COMPLETED if len(rows) == config["rounds"] else STOPPED
    method, seed = config["strategy"]["title"], config["seed"]
    summary = {"status": status, "strategy": method, "seed": seed, "rounds": len(rows)}
    write_summary(folder, summary)


def main() -> None:
    """Run one method on one seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clone", type=Path, help="of github.com/liuvvvvv1/FedDW")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--alpha", type=float, default=0.1, help="of the Dirichlet distribution")
    parser.add_argument("--part", type=float, default=0.5, help="of the clients in each round")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True, help="a folder of results directories")
    options = parser.parse_args()
    if not (options.clone / "main.py").is_file():
        parser.error(f"{options.clone} has no main.py: clone github.com/liuvvvvv1/FedDW there")
    if "FEDHET_DATA" not in os.environ:
        parser.error("FEDHET_DATA is not set: it names the folder with cifar10/train.parquet")
    config = {
        "task": {"name": "cifar10"},
        "strategy": {"title": f"{METHODS[options.method]} (released)"},
        "partition": {"name": "dirichlet", "alpha": options.alpha},
        "participation": options.part,
        "seed": options.seed,
        "rounds": options.rounds,
        "torch": str(torch.__version__),
    }
    name = f"{options.method.lower()}_a{options.alpha:g}_s{options.seed}"
    accuracies: list[float] = []

    def done(accuracy: float) -> None:
        accuracies.append(accuracy)
        write_results(options.out / name, config, accuracies)
        said = f"round {len(accuracies):3}/{options.rounds}   accuracy {accuracy:.2f} %"
        print(said, file=sys.stderr)

    settings = partial(
        settings_of,
        method=options.method,
        alpha=options.alpha,
        part=options.part,
        rounds=options.rounds,
    )
    with redirect_stdout(io.StringIO()):  # a page a round
        run(options.clone, settings, options.seed, done)


if __name__ == "__main__":
    main()
