"""Time of one local epoch by method, over FedAvg's, in one run on one machine.

    FEDHET_DATA=... python benchmarks/epoch.py [METHOD ...] --out FILE [--protocol fedmrur]
    FEDHET_DATA=... python benchmarks/epoch.py --profile METHOD --out FILE [--protocol fedmrur]

``--protocol feddw`` trains as FedDW's Table III does (Adam, batch 128), ``fedmrur`` as FedMRUR's
Table 11 (SGD, batch 50, clipped; the paper's times there are of a whole round). A METHOD is the
name of a strategy, with further words of its recipe if need be: "fedmrur strategy.sam.rho=0.05".

One client trains for an epoch by ``train_locally``, with its optimizer, sides and payloads:
5,000 CIFAR-10 images (or noise in their place), augmented, one thread. Every measurement stands
between two of FedAvg with the same head (FedDW's has no bias), and a ratio is of it over the mean
of the two, so that a drift of the machine's speed cancels. Methods take turns in an order that
rotates. The first round of each is not counted: it warms up, and leaves what a method needs of an
earlier round (MOON's previous model). All take as many steps (Per-FedAvg half as many), so a ratio
of epochs is one of steps.

The row "plain" is a loop in PyTorch's own words, with torch.optim and nothing of ours but the
batches; "fedavg" is FedAvg over itself, which says what the measurement is worth. What a method
does before and after its epochs (FedDW: the soft labels of all examples) is timed apart, and given
as a share of five epochs of its own.

``--profile`` says where one method's time goes instead: see benchmarks/step_parts.py.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig
from step_parts import Parts, table_of
from torch import Tensor, nn
from torch.nn import functional as F

from client_app.training import train_locally
from conf import build_local_optimizer, build_part, compose, plain_part
from strategies.base import ClientSide, LocalContext, LocalOptimizer, LocalSummary
from strategies.components.local_training_config import LocalTrainingConfig, local_training_config
from strategies.components.tensor_selection import TensorSelector, shared_names
from tasks import Task, build_task, keep_freed_memory
from tasks.tensor_data import TensorData

CLIENTS, EPOCHS_OF_A_ROUND, SEED = 10, 5, 0


@dataclass(frozen=True)
class Protocol:
    """How a paper trains, and the time that it reports.

    Attributes:
        words: of every method's recipe.
        model: what is trained.
        methods: what is measured.
        paper: its seconds by method: FedDW's of an epoch, FedMRUR's of a round.
    """

    words: tuple[str, ...]
    model: str
    methods: tuple[str, ...]
    paper: Mapping[str, float]

    def over_fedavg(self, method: str) -> float | None:
        """Return the paper's ratio of a method's time to FedAvg's, if it has one."""
        return self.paper[method] / self.paper["fedavg"] if method in self.paper else None


PROTOCOLS = {
    "feddw": Protocol(
        words=("local=adam",),
        model="feddw_cnn",
        methods=("fedavg", "fedprox", "moon", "fedbabu", "feduv", "per_fedavg", "feddw"),
        paper={
            "fedavg": 0.01605,
            "moon": 0.01893,
            "fedbabu": 0.01567,
            "feduv": 0.01718,
            "per_fedavg": 0.01917,
            "fedprox": 0.01732,
            "feddw": 0.01611,
        },
    ),
    "fedmrur": Protocol(
        words=(
            "local.lr=0.1",
            "local.batch_size=50",
            "local.weight_decay=0.0005",
            "local.clip=10",
            "task.crop_probability=0.5",
        ),
        model="gn_cnn",
        methods=(
            "fedavg",
            "fedprox",
            "scaffold",
            "fedcm",
            "fedsam",
            "mofedsam",
            "fedmrur",
            "fedmrur strategy.sam.rho=0.05",
        ),
        paper={
            "fedavg": 9.23,
            "fedexp": 14.82,
            "scaffold": 15.52,
            "fedprox": 12.89,
            "fedcm": 11.53,
            "mofedsam": 15.53,
            "fedmrur": 16.82,
        },
    ),
}


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
    strategy, *own = method.split()
    common = [f"task={options.task}", f"task.model={options.model}", "runtime=local"]
    common += [f"task.train_size={CLIENTS * options.examples}", "partition=iid"]
    common += [
        f"clients={CLIENTS}",
        *PROTOCOLS[options.protocol].words,
        "local.epochs=1",
        *options.words,
    ]
    return compose({"overrides": json.dumps([*common, f"strategy={strategy}", *own, *words])})


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


@dataclass
class Client:
    """A client of the recipe's method, from round to round."""

    model: nn.Module
    initial: dict[str, Tensor]
    anchor: dict[str, Tensor]
    received: dict[str, dict[str, Tensor]]
    state: dict[str, Mapping[str, Tensor]]
    data: TensorData
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: LocalOptimizer
    sides: Sequence[ClientSide]
    plan: LocalTrainingConfig
    lr: float

    def context(self) -> LocalContext:
        """Return a round's, the model as received."""
        self.model.load_state_dict(self.initial)
        return LocalContext(
            model=self.model,
            received_state=self.initial,
            anchor=self.anchor,
            received=self.received,
            state=self.state,
            data=self.data,
            loss=self.loss,
            round=2,
            batch_size=self.plan.batch_size,
        )

    def train(self, context: LocalContext, sides: Sequence[ClientSide]) -> LocalSummary:
        """Train for an epoch; always on the same batches."""
        order = torch.Generator().manual_seed(SEED)
        return train_locally(context, sides, self.optimizer, self.plan, self.lr, order)[0]


def client_of(task: Task, recipe: DictConfig, data: TensorData, device: str) -> Client:
    """Return a client of the recipe's method."""
    model, tensors = model_of(task, recipe, device), task.classifier_tensors
    optimizer = build_local_optimizer(recipe, tensors)
    sides = list(build_part(recipe, "strategy.client_sides", tensors).values())
    for side in sides:
        side.check(model, optimizer, [name for name, _ in model.named_parameters()])
    initial = {name: value.clone() for name, value in model.state_dict().items()}
    shared = set(shared_names(model, TensorSelector(recipe.strategy.personal)))
    anchor = {name: initial[name] for name, _ in model.named_parameters() if name in shared}
    received = {}
    for server_side in build_part(recipe, "strategy.server_sides", tensors).values():
        server_side.init({name: value.cpu() for name, value in anchor.items()})
        for payload, values in server_side.broadcast(0).items():
            received[payload] = {name: value.to(device) for name, value in values.items()}
    plan, lr = local_training_config(recipe.local, recipe.strategy.phases), float(recipe.local.lr)
    return Client(model, initial, anchor, received, {}, data, task.loss, optimizer, sides, plan, lr)


def federated(client: Client, device: str) -> Measure:
    """Return what measures a round at the client."""

    def measure() -> Round:
        context, sides, done = client.context(), copy.deepcopy(client.sides), []
        return Round(
            begin=seconds(lambda: [side.begin(context) for side in sides], device),
            epoch=seconds(lambda: done.append(client.train(context, sides)), device),
            end=seconds(lambda: [side.end(context, done[0]) for side in sides], device),
        )

    return measure


def plain(task: Task, recipe: DictConfig, data: TensorData, device: str) -> Measure:
    """Return what measures an epoch of a loop in PyTorch's own words."""
    model, local = model_of(task, recipe, device), recipe.local
    initial = copy.deepcopy(model.state_dict())
    kind = torch.optim.Adam if local.optimizer == "adam" else torch.optim.SGD

    def epoch() -> None:
        model.train()
        optimizer = kind(model.parameters(), lr=local.lr, weight_decay=local.weight_decay)
        order = torch.Generator().manual_seed(SEED)
        for inputs, labels in data.batches(local.batch_size, generator=order, train=True):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs)[1], labels).backward()
            if local.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), local.clip)
            optimizer.step()

    def measure() -> Round:
        model.load_state_dict(initial)
        return Round(begin=0.0, epoch=seconds(epoch, device), end=0.0)

    return measure


# ---- measuring -----------------------------------------------------------------------------------


def groups(options: argparse.Namespace) -> list[tuple[Contender, list[Contender]]]:
    """Return, by kind of head, FedAvg and those that are measured over it."""
    by_head: dict[bool, list[str]] = {}
    for method in options.methods or PROTOCOLS[options.protocol].methods:
        has_bias = recipe_of(method, options).task.head_bias is not False
        by_head.setdefault(has_bias, []).append(method)
    found = []
    for has_bias, methods in by_head.items():
        head = f"task.head_bias={str(has_bias).lower()}"
        recipe = recipe_of("fedavg", options, head)
        task = task_of(recipe)
        data = examples(task, recipe, options)
        shared = (task, recipe, data, options.device)
        base = Contender("fedavg", has_bias, federated(client_of(*shared), options.device))
        members = [Contender("plain", has_bias, plain(*shared))]
        for method in dict.fromkeys(["fedavg", *methods]):
            client = client_of(task, recipe_of(method, options, head), data, options.device)
            members.append(Contender(method, has_bias, federated(client, options.device)))
        found.append((base, members))
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


def figures_of(member: Contender, plain_loop: Contender, paper: float | None) -> dict:
    """Return a member's figures; seconds are of an epoch."""
    epochs = [r.epoch for r in member.rounds]
    around = [(r.begin + r.end) / (EPOCHS_OF_A_ROUND * r.epoch) for r in member.rounds]
    pairs = zip(epochs, plain_loop.rounds, strict=True)
    return {
        "method": member.name,
        "head_bias": member.head_bias,
        "seconds": spread(epochs),
        "over_fedavg": spread(member.over_fedavg),
        "paper_over_fedavg": paper,
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
    paper = figures["paper_over_fedavg"]
    cells.insert(4, "" if paper is None else f"{paper:.3f}")
    return "| " + " | ".join(cells) + " |"


def compare(options: argparse.Namespace) -> dict:
    """Measure the methods over FedAvg; print a row each."""
    print("| method | head bias | ms/epoch | over FedAvg | paper | over plain | around, % of 5 |")
    print("|---|---|---|---|---|---|---|")
    found = []
    for base, members in groups(options):
        take_turns(base, members, options.repeats)
        for member in members:
            paper = PROTOCOLS[options.protocol].over_fedavg(member.name)
            found.append(figures_of(member, members[0], paper))
            print(row(found[-1]), flush=True)
    print(f"median (quartiles) of {options.repeats} rounds; around: begin and end, % of 5 epochs")
    return {"results": found}


def profile(options: argparse.Namespace) -> dict:
    """Measure the parts of a method's step; print a table, and write it beside the figures."""
    recipe = recipe_of(options.profile, options)
    task = task_of(recipe)
    client = client_of(task, recipe, examples(task, recipe, options), options.device)
    measure = federated(client, options.device)
    measure()  # warms up, and leaves what a method needs of an earlier round
    unprofiled = spread([measure().epoch for _ in range(options.repeats)])
    context, sides = client.context(), copy.deepcopy(client.sides)
    parts, done = Parts(options.device), []
    for side in sides:
        side.begin(context)
    parts.mark(context, sides)
    client.optimizer = parts.optimizer(client.optimizer)
    found = parts.profile(lambda: done.append(client.train(context, sides)))
    table = table_of(found, done[0].num_steps)
    options.out.with_suffix(".md").write_text(table)
    print(table, end="")
    return {
        "method": options.profile,
        "steps": done[0].num_steps,
        "seconds_unprofiled": unprofiled,
        "parts": found,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: the protocol's")
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="feddw")
    parser.add_argument("--profile", metavar="METHOD", help="the parts of its step instead")
    parser.add_argument("--task", default="cifar10", help="cifar10 | cifar100")
    parser.add_argument("--model", help="default: the protocol's")
    parser.add_argument("--words", nargs="+", default=[], help="further words of every recipe")
    parser.add_argument("--examples", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--noise", action="store_true", help="images of noise: needs no data")
    options = parser.parse_args()
    options.model = options.model or PROTOCOLS[options.protocol].model
    if not options.noise and "FEDHET_DATA" not in os.environ:
        raise SystemExit(
            f"set FEDHET_DATA to the folder that holds {options.task}/, or add --noise"
        )
    if options.repeats < 2:
        raise SystemExit(f"--repeats {options.repeats} has no quartiles: at least 2")
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    result = {
        "options": {**vars(options), "out": str(options.out)},
        **(profile(options) if options.profile else compare(options)),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
