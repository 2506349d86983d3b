"""Runs SCAFFOLD of a clone of NIID-Bench, with its two faults or without, on ``FEDHET_DATA``.

    python -m fedhet.reproductions.niid_bench.released_code CLONE --divisor 10 --out runs.json

Clone github.com/Xtra-Computing/NIID-Bench (61b901a). Two lines can be changed: what the sum of the
changes of the control variates is divided by, and from where they start. Besides, the images are
those of ``FEDHET_DATA``, and only the global model is evaluated, on the test images: the accuracies
of single clients decide nothing. After each round the file has the accuracies and, as
docs/results/niid_bench.md explains them, the norms of c and of the mean of all c_i.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedhet.common.files import save_text
from fedhet.reproductions.cifar10 import read_cifar10
from fedhet.tasks.device import keep_freed_memory

PROTOCOL = "--alg=scaffold --model=simple-cnn --dataset=cifar10 --device=cpu --init_seed=0"
PROTOCOL += (
    " --lr=0.01 --rho=0.9 --batch-size=64 --epochs=10 --n_parties=100 --sample=0.1 --beta=0.5"
)
DIVISION = "total_delta[key] /= args.n_parties"
GLOBAL = "c_global = c_globals[0]"
PATCHED = ("torchvision.datasets", "torch.utils.model_zoo")
DIVISORS = {100: DIVISION, 10: "total_delta[key] /= len(selected)"}  # 10: until its commit 66095cc
STARTS = {"random": GLOBAL, "zero": f"{GLOBAL}; [p.data.zero_() for p in c_global.parameters()]"}


def changed(code: str, divisor: int, start: str) -> str:
    """Return the clone's experiments.py with the divisor and the start of a run.

    Raises:
        ValueError: if it is not the file of 61b901a.
    """
    for line, new in ((DIVISION, DIVISORS[divisor]), (GLOBAL, STARTS[start])):
        if code.count(line) != 1:
            raise ValueError(f"experiments.py has {line!r} {code.count(line)} times, not once")
        code = code.replace(line, new)
    return code


class Images:
    """The training or test images, in place of torchvision's CIFAR10.

    Attributes:
        data: (n, 32, 32, 3), bytes.
        targets: labels, (n,).
    """

    def __init__(self, root: str, train: bool, *_: object) -> None:
        """Read them; the arguments are torchvision's."""
        folder = Path(os.environ["FEDHET_DATA"]) / "cifar10"
        found = read_cifar10(folder, "train" if train else "test")
        self.data = np.array(found.read().transpose(0, 2, 3, 1))  # a copy, which may be written to
        self.targets = found.labels.tolist()


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the L2 norm of all tensors together."""
    return float(sum(tensor.square().sum() for tensor in tensors.values()) ** 0.5)


def mean(networks: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    """Return the mean of the networks' tensors."""
    states = [network.state_dict() for network in networks.values()]
    return {name: sum(state[name] for state in states) / len(states) for name in states[0]}


def run(
    clone: Path, code: str, words: list[str], done: Callable[[float, float, float], None]
) -> None:
    """Run the code; ``done`` takes the accuracy in [0, 1] and the two norms after each round."""
    sys.path.insert(0, str(clone))
    modules: list[Any] = [importlib.import_module(name) for name in PATCHED]
    datasets, zoo = modules
    datasets.CIFAR10, zoo.tqdm = Images, None  # tqdm: imported from there, as of torch 1.1
    tools: Any = importlib.import_module("utils")  # of the clone, which imports these two
    measure = tools.compute_accuracy
    variables: dict[str, Any] = {"__name__": "__main__"}

    def compute_accuracy(model: nn.Module, data: Any, *args: Any, **options: Any) -> Any:
        if not options.get("get_confusion_matrix", False):
            return 0.0
        if model is not variables["global_model"]:
            return 0.0, None
        found = measure(model, data, *args, **options)
        c_norms = norm(variables["c_global"].state_dict()), norm(mean(variables["c_nets"]))
        done(found[0], *c_norms)
        return found

    tools.compute_accuracy = compute_accuracy
    sys.argv = ["experiments.py", *words]
    keep_freed_memory()
    exec(compile(code, "experiments.py", "exec"), variables)  # the clone's


def main() -> None:
    """Run one of the settings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clone", type=Path, help="of github.com/Xtra-Computing/NIID-Bench")
    parser.add_argument("--partition", default="noniid-labeldir", help="or noniid-#label2")
    parser.add_argument("--divisor", type=int, choices=DIVISORS, default=100)
    parser.add_argument("--start", choices=STARTS, default="random")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    options = parser.parse_args()
    try:
        code = (options.clone / "experiments.py").read_text()
        code = changed(code, options.divisor, options.start)
    except (OSError, ValueError) as error:
        parser.error(f"{options.clone} is no clone of NIID-Bench at 61b901a: {error}")
    if "FEDHET_DATA" not in os.environ:
        parser.error("FEDHET_DATA is not set: it names the folder with cifar10/train.parquet")
    about = {name: getattr(options, name) for name in ("partition", "divisor", "start")}
    series: dict[str, list[float | None]] = {"accuracy": [None], "c": [None], "mean_c_i": [None]}

    def done(*values: float) -> None:
        for found, value in zip(series.values(), values, strict=True):
            found.append(value)
        save_text(options.out, json.dumps(about | series) + "\n")
        print(f"round {len(series['accuracy']) - 1:3}   accuracy {100 * values[0]:.2f} %")

    with tempfile.TemporaryDirectory() as folder:
        words = [*PROTOCOL.split(), f"--logdir={folder}", f"--datadir={folder}"]
        words += [f"--partition={options.partition}", f"--comm_round={options.rounds}"]
        run(options.clone, code, words, done)


if __name__ == "__main__":
    main()
