"""Time of one local epoch by method, over FedAvg's: Table III of FedDW, in one run on one machine.

    FEDHET_DATA=... python benchmarks/epoch.py [METHOD ...] --out FILE [--model feddw_resnet18]

One client trains for an epoch by ``train_locally``, with the recipe's solver, sides and payloads:
5,000 CIFAR-10 images (or noise in their place), augmented, batch 128, Adam, one thread. Every
measurement stands between two of FedAvg with the same head (FedDW's has no bias), and a ratio is of
it over the mean of the two, so that a drift of the machine's speed cancels. Methods take turns in
an order that rotates. The first round of each is not counted: it warms up, and leaves what a method
needs of an earlier round (MOON's previous model).

The row "plain" is a loop in PyTorch's own words, with torch.optim.Adam and nothing of ours but the
batches; "fedavg" is FedAvg over itself, which says what the measurement is worth. What a method
does before and after its epochs (FedDW: the soft labels of all examples) is timed apart, and given
as a share of five epochs of its own.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from client_app.training import train_locally
from conf import build_part, build_solver, compose, plain_part
from strategies.base import LocalContext
from strategies.layers import LayerSelector, shared_names
from strategies.local_options import local_options
from tasks import Task, build_task, keep_freed_memory
from tasks.tensor_data import TensorData

METHODS = ("fedavg", "fedprox", "moon", "fedbabu", "feduv", "per_fedavg", "feddw")
CLIENTS, EPOCHS_OF_A_ROUND, SEED = 10, 5, 0


@dataclass
class Round:
    """Seconds that a client spent before, in and after one epoch."""

    begin: float
    epoch: float
    end: float


Measure = Callable[[], Round]


@dataclass
class Contender:
    """What is measured, and what was found."""

    name: str
    head_bias: bool
    measure: Measure
    rounds: list[Round] = field(default_factory=list)
    over_fedavg: list[float] = field(default_factory=list)

    def run(self) -> float:
        """Measure a round; return the seconds of its epoch."""
        self.rounds.append(self.measure())
        return self.rounds[-1].epoch


def seconds(work: Callable[[], object], device: str) -> float:
    """Return how long it takes, until the device is done with it."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


# ---- the recipe's client, and the plain loop -----------------------------------------------------


def recipe_of(method: str, options: argparse.Namespace, *words: str) -> DictConfig:
    """Compose the recipe of a method."""
    common = [f"task={options.task}", f"task.model={options.model}", "runtime=local"]
    common += [f"task.train_size={CLIENTS * options.examples}", "partition=iid"]
    common += [f"clients={CLIENTS}", "local=adam", "local.epochs=1"]
    return compose({"overrides": json.dumps([*common, f"strategy={method}", *words])})


def task_of(recipe: DictConfig) -> Task:
    """Build the task; its examples are read when they are asked for."""
    task, partition = plain_part(recipe, "task"), plain_part(recipe, "partition")
    return build_task(task, partition, seed=SEED, num_clients=CLIENTS)


def examples(task: Task, recipe: DictConfig, options: argparse.Namespace) -> TensorData:
    """Return client 0's examples, or as many images of noise."""
    where = {"device": options.device, "channels_last": bool(recipe.runtime.channels_last)}
    if not options.noise:
        return task.client_data(0, **where)[0]
    generator, classes = np.random.default_rng(SEED), int(recipe.task.num_classes)
    pixels = generator.integers(0, 256, (options.examples, *task.input_shape), dtype=np.uint8)
    labels = generator.integers(0, classes, options.examples)
    how = {"num_classes": classes, "transform": task.config.transform}
    return TensorData(pixels, labels, **how, **where)


def model_of(task: Task, recipe: DictConfig, device: str) -> nn.Module:
    """Return the initial model on the device, as a client has it."""
    model = task.build_model(SEED).to(device)
    return model.to(memory_format=torch.channels_last) if recipe.runtime.channels_last else model


def federated(task: Task, recipe: DictConfig, data: TensorData, device: str) -> Measure:
    """Return what measures a round of the recipe's method at one client."""
    model, tensors = model_of(task, recipe, device), task.classifier_tensors
    solver = build_solver(recipe, tensors)
    sides = build_part(recipe, "strategy.client_sides", tensors)
    plan = local_options(recipe.local, recipe.strategy.phases)
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    shared = set(shared_names(model, LayerSelector(recipe.strategy.personal)))
    anchor = {name: initial[name] for name, _ in model.named_parameters() if name in shared}
    received = {}
    for server_side in build_part(recipe, "strategy.server_sides", tensors).values():
        server_side.init({name: value.cpu() for name, value in anchor.items()})
        for payload, values in server_side.broadcast(0).items():
            received[payload] = {name: value.to(device) for name, value in values.items()}
    for side in sides.values():
        side.check(model, solver)
    state: dict = {}

    def measure() -> Round:
        model.load_state_dict(initial)
        context = LocalContext(
            model=model,
            received_state=initial,
            anchor=anchor,
            received=received,
            state=state,
            data=data,
            loss=task.loss,
            round=2,
            batch_size=plan.batch_size,
        )
        ours = [copy.deepcopy(side) for side in sides.values()]
        order, done = torch.Generator().manual_seed(SEED), []
        how = (solver, plan, float(recipe.local.lr), order)
        return Round(
            begin=seconds(lambda: [side.begin(context) for side in ours], device),
            epoch=seconds(lambda: done.append(train_locally(context, ours, *how)), device),
            end=seconds(lambda: [side.end(context, done[0][0]) for side in ours], device),
        )

    return measure


def plain(task: Task, recipe: DictConfig, data: TensorData, device: str) -> Measure:
    """Return what measures an epoch of a loop in PyTorch's own words."""
    model = model_of(task, recipe, device)
    initial = copy.deepcopy(model.state_dict())

    def epoch() -> None:
        model.train()
        optimizer = torch.optim.Adam(model.parameters(), lr=recipe.local.lr)
        order = torch.Generator().manual_seed(SEED)
        for inputs, labels in data.batches(recipe.local.batch_size, generator=order, train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs)[1], labels).backward()
            optimizer.step()

    def measure() -> Round:
        model.load_state_dict(initial)
        return Round(begin=0.0, epoch=seconds(epoch, device), end=0.0)

    return measure


# ---- measuring -----------------------------------------------------------------------------------


def groups(options: argparse.Namespace) -> list[tuple[Contender, list[Contender]]]:
    """Return, by kind of head, FedAvg and those that are measured over it."""
    by_head: dict[bool, list[str]] = {}
    for method in options.methods or METHODS:
        has_bias = recipe_of(method, options).task.head_bias is not False
        by_head.setdefault(has_bias, []).append(method)
    found = []
    for has_bias, methods in by_head.items():
        head = f"task.head_bias={str(has_bias).lower()}"
        recipe = recipe_of("fedavg", options, head)
        task = task_of(recipe)
        data = examples(task, recipe, options)
        shared = (task, recipe, data, options.device)
        members = [Contender("plain", has_bias, plain(*shared))]
        for method in dict.fromkeys(["fedavg", *methods]):
            measure = federated(task, recipe_of(method, options, head), data, options.device)
            members.append(Contender(method, has_bias, measure))
        found.append((Contender("fedavg", has_bias, federated(*shared)), members))
    return found


def take_turns(base: Contender, members: Sequence[Contender], repeats: int) -> None:
    """Measure: base, member, base, member, ..., base, in an order that rotates."""
    for contender in (base, *members):
        contender.measure()
    for repeat in range(repeats):
        first = repeat % len(members)
        before = base.run()
        for member in (*members[first:], *members[:first]):
            this, after = member.run(), base.run()
            member.over_fedavg.append(2 * this / (before + after))
            before = after


def figures_of(member: Contender, plain_loop: Contender) -> dict:
    """Return a member's figures; seconds are of an epoch."""
    epochs = [r.epoch for r in member.rounds]
    around = [(r.begin + r.end) / (EPOCHS_OF_A_ROUND * r.epoch) for r in member.rounds]
    pairs = zip(epochs, plain_loop.rounds, strict=True)
    return {
        "method": member.name,
        "head_bias": member.head_bias,
        "seconds": spread(epochs),
        "over_fedavg": spread(member.over_fedavg),
        "over_plain": spread([ours / theirs.epoch for ours, theirs in pairs]),
        "begin_and_end_over_five_epochs": spread(around),
        "rounds": [asdict(r) for r in member.rounds],
        "ratios": member.over_fedavg,
    }


def spread(values: Sequence[float]) -> list[float]:
    """Return lower quartile, median and upper quartile."""
    return statistics.quantiles(values, n=4, method="inclusive")


def row(figures: dict) -> str:
    """Return a row of the table."""
    columns = {"seconds": (1e3, ".1f"), "over_fedavg": (1, ".4f"), "over_plain": (1, ".4f")}
    columns["begin_and_end_over_five_epochs"] = (100, ".2f")
    cells = [figures["method"], "yes" if figures["head_bias"] else "no"]
    for key, (factor, form) in columns.items():
        low, middle, high = (f"{factor * value:{form}}" for value in figures[key])
        cells.append(f"{middle} ({low} to {high})")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=" ".join(METHODS))
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--task", default="cifar10", help="cifar10 | cifar100")
    parser.add_argument("--model", default="feddw_cnn")
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--noise", action="store_true", help="images of noise: needs no data")
    options = parser.parse_args()
    if not options.noise and "FEDHET_DATA" not in os.environ:
        raise SystemExit(
            f"set FEDHET_DATA to the folder that holds {options.task}/, or add --noise"
        )
    if options.repeats < 2:
        raise SystemExit(f"--repeats {options.repeats} has no quartiles: at least 2")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    print("| method | head bias | ms/epoch | over FedAvg | over plain | around, % of 5 epochs |")
    print("|---|---|---|---|---|---|")
    found = []
    for base, members in groups(options):
        take_turns(base, members, options.repeats)
        for member in members:
            found.append(figures_of(member, members[0]))
            print(row(found[-1]), flush=True)
    result = {
        "options": {**vars(options), "out": str(options.out)},
        "results": found,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"median (quartiles) of {options.repeats} rounds; written to {options.out}")


if __name__ == "__main__":
    main()
