"""Time of MA-Echo's aggregation beside the released loop's, in one run on one machine.

    FEDHET_DATA=... python benchmarks/fusion.py --out FILE
    python benchmarks/fusion.py --resnet --out FILE

N clients (5, 10, 20 and 50) train the paper's perceptron for an epoch on MNIST, split as in its
Table 1 (the first beta of each N), and send projections. Measured is the whole aggregation, 60
iterations that nothing stops early: ours with eq. 6 solved in each (weights=program), with the
projections' full rank, with that which keeps 99 % of each one's energy, and with 20; and the
released loop with dense projections, uniform weights and without eq. 6, written in plain PyTorch
(facts.md 1.3). Each ratio is over the mean of the dense loops before and after, and they take
turns. Without FEDHET_DATA models are random, and the inputs' second moments have eigenvalues
1, 2^-1.6, 3^-1.6, ... as MNIST's do.

A second, profiled run says how the time of ours divides, and the floor is how long its
floating-point operations would take at the speed of the machine's matrix products, measured in the
same run. ``--clock cpu`` counts the process's own time, for machines that others use.

``--resnet`` measures what projections of a ResNet-18 cost at rank 32: bytes sent, seconds and
memory at the client (200 images of noise) and at the server (10 clients).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from client_app.training import train_locally
from conf import compose, plain_part
from strategies import maecho
from strategies.base import LocalContext, LocalSummary, Reply, Tensors
from strategies.components.local_optimizers import SGD
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.fusion.min_norm import Shortest
from strategies.fusion.projected_layers import (
    local_models,
    masked_classifier,
    projected_layers,
    read_layer,
)
from strategies.fusion.projection_steps import (
    AlongDirections,
    AlongInputs,
    PullByPull,
    Span,
    Steps,
    cheapest,
)
from strategies.fusion.projections import (
    PROJECTIONS,
    SCALES,
    ProjectionClient,
    Spectrum,
    factor,
)
from strategies.maecho import HarmonizedOptima, Normalised
from strategies.statistics.class_counts import CLASS_COUNTS, COUNTS, HEAD
from tasks import build_task, keep_freed_memory
from tasks.models import build_model
from tasks.tensor_data import TensorData
from tasks.transform import Transform

ITERATIONS, STEP, CAP = 60, 1.6, 0.5
FIRST_BETA = {5: 0.01, 10: 0.01, 20: 0.01, 50: 0.1}  # of the paper's Table 1
CPU = torch.device("cpu")
Payloads = dict[str, dict[str, Tensor]]


# ---- clients -------------------------------------------------------------------------------------


def mnist_clients(count: int, options: argparse.Namespace) -> tuple[Tensors, list[Reply]]:
    """Return x and the replies of clients that trained for an epoch, each from its own start."""
    beta = options.beta or FIRST_BETA.get(count, 0.1)
    words = ["task=mnist", "task.model=mlp", "partition=dirichlet", f"partition.alpha={beta}"]
    recipe = compose({"overrides": json.dumps([*words, f"clients={count}", "runtime=local"])})
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=1, num_clients=count)
    x = task.build_model(0).state_dict()
    replies = []
    for i in range(count):
        model, data = task.build_model(1 + i), task.client_data(i, device="cpu")[0]
        context = context_of(model, data, task.loss, seed=i)
        plan, order = LocalTrainingConfig(batch_size=64, epochs=1), torch.Generator().manual_seed(i)
        summary, _ = train_locally(context, [], SGD(momentum=0.5), plan, 0.01, order)
        payloads = ProjectionClient(form=options.form).end(context, summary)
        update = {name: value.detach() - x[name] for name, value in model.named_parameters()}
        replies.append(Reply(i, len(data), summary.num_steps, summary.lr_sum, update, payloads))
    return x, replies


def synthetic_clients(count: int, options: argparse.Namespace) -> tuple[Tensors, list[Reply]]:
    """Return x and the replies of random models with projections as MNIST's."""
    x = build_model("mlp", input_shape=(1, 28, 28), num_classes=10, seed=0).state_dict()
    return x, [random_reply(i, x, partial(spectrum, seed=i)) for i in range(count)]


def spectrum(width: int, seed: int) -> Spectrum:
    """Return random vectors and the ridge form's eigenvalues of second moments k^-1.6."""
    rank = round(0.8 * width)
    moments = torch.arange(1, rank + 1, dtype=torch.float64) ** -1.6
    values = moments / (moments + moments.sum() / width)
    drawn = torch.randn(width, rank, generator=torch.Generator().manual_seed(seed))
    return Spectrum(torch.linalg.qr(drawn).Q.double(), values)


def random_reply(client: int, x: Tensors, draw: Callable[[int], Spectrum]) -> Reply:
    """Return what a client of a random model, as large as x, sends."""
    generator = torch.Generator().manual_seed(client)
    update = {
        name: torch.randn(value.shape, generator=generator) * value.std() - value
        for name, value in x.items()
    }
    layers = {name: value[0].numel() for name, value in x.items() if value.dim() in (2, 4)}
    payloads: Payloads = {
        PROJECTIONS: {name: factor(draw(width), None, 1.0) for name, width in layers.items()},
        SCALES: {name: torch.ones(()) for name in layers},
        CLASS_COUNTS: {COUNTS: torch.full((len(x[f"{HEAD}.weight"]),), 10.0)},
    }
    return Reply(client, 100, 1, 0.1, update, payloads)


def context_of(
    model: torch.nn.Module, data: TensorData, loss: Callable[..., Tensor], seed: int
) -> LocalContext:
    """Return the context of a client that received its own model."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    order = torch.Generator().manual_seed(seed)
    return LocalContext(model, state, state, {}, {}, data, loss, 1, 64, order)


def shortened(replies: Sequence[Reply], rank: int | None, energy: float) -> list[Reply]:
    """Return the replies with factors of a rank, or of those columns that hold the energy."""
    return [
        Reply(
            reply.client_id,
            reply.num_examples,
            reply.num_steps,
            reply.lr_sum,
            reply.update,
            {
                **reply.payloads,
                PROJECTIONS: {
                    name: values[:, : rank or needed(values, energy)]
                    for name, values in reply.payloads[PROJECTIONS].items()
                },
            },
        )
        for reply in replies
    ]


def needed(values: Tensor, energy: float) -> int:
    """Return how many of a factor's columns hold the energy."""
    held = values.square().sum(0).double().square().cumsum(0)
    return int((held < energy * held[-1]).sum()) + 1


# ---- the released loop ---------------------------------------------------------------------------


def dense_projectors(replies: Sequence[Reply]) -> dict[str, list[Tensor]]:
    """Return the null projectors N_i = I - P_i (d, d) by layer, as the released clients send."""
    found: dict[str, list[Tensor]] = {}
    for name in projected_layers(replies):
        factors = [reply.payloads[PROJECTIONS][name] for reply in replies]
        found[name] = [torch.eye(len(values)) - values @ values.T for values in factors]
    return found


@torch.no_grad()
def released_loop(
    x: Tensors, replies: Sequence[Reply], null: Mapping[str, Sequence[Tensor]]
) -> dict[str, Tensor]:
    """Return the update of the released loop as it is written: dense, uniform, without eq. 6.

    Two products of (out, d) with (d, d) for each client, layer and iteration (facts.md 1.3).
    """
    local = local_models(x, replies)
    fused = dict(masked_classifier(x, replies))
    for name, projectors in null.items():
        optima = list(local[name].clone())
        model, share = local[name].mean(0), 1.0 / len(optima)
        taken = [n - torch.eye(len(n)) for n in projectors]
        for _ in range(ITERATIONS):
            pull = torch.zeros_like(model)
            for i, optimum in enumerate(optima):
                pull += share * ((model - optimum) @ taken[i].T)
            model = model + STEP * pull
            for i, optimum in enumerate(optima):
                optima[i] = optimum + STEP * ((model - optimum) @ projectors[i].T)
        fused[name] = torch.stack(optima).mean(0)
    return {name: fused[name] - value for name, value in x.items()}


# ---- measuring -----------------------------------------------------------------------------------


class Clock:
    """Measures by the wall or by the process's own time.

    Args:
        kind: "wall" or "cpu".
    """

    def __init__(self, kind: str) -> None:
        self.now = time.perf_counter if kind == "wall" else time.process_time

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long it takes."""
        began = self.now()
        work()
        return self.now() - began


PARTS: dict[str, tuple[tuple[type, str], ...]] = {
    "program": ((Shortest, "__call__"),),
    "gram": tuple((kind, "gram") for kind in (AlongInputs, AlongDirections, PullByPull)),
    "updates": (
        *((kind, "move") for kind in (AlongInputs, AlongDirections)),
        *((kind, "take_in") for kind in (AlongInputs, AlongDirections, PullByPull)),
        *((kind, "follow") for kind in (maecho.Cumulative, maecho.FromLocal, Normalised)),
    ),
    "reading": ((Span, "__init__"), (Span, "coordinates")),
}


@contextmanager
def timed(clock: Clock) -> Iterator[Counter[str]]:
    """Count the seconds of an aggregation's parts inside the block."""
    spent: Counter[str] = Counter()

    def around(part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **options: Any) -> Any:
            began = clock.now()
            try:
                return work(*args, **options)
            finally:
                spent[part] += clock.now() - began

        return measured

    with ExitStack() as stack:
        for part, methods in PARTS.items():
            for owner, name in methods:
                replaced = around(part, owner.__dict__[name])
                stack.enter_context(patch.object(owner, name, replaced))
        read = patch.object(maecho, "read_layer", around("reading", read_layer))
        stack.enter_context(read)
        yield spent


def product_speed() -> float:
    """Return operations a second of the machine's products of (400, 784) with (784, 784)."""
    left, right = torch.randn(400, 784), torch.randn(784, 784)
    clock, times = Clock("cpu"), []
    for _ in range(20):
        times.append(clock.seconds(lambda: [left @ right for _ in range(5)]))
    return torch.get_num_threads() * 5 * 2 * 400 * 784 * 784 / min(times)


def operations(replies: Sequence[Reply], x: Tensors) -> float:
    """Return how many floating-point operations ours takes for all iterations, in products."""
    total, local = 0.0, local_models(x, replies)
    for name in projected_layers(replies):
        span = Span(read_layer(name, local, replies, CPU, dense=False), fold=True)
        total += ITERATIONS * len(x[name]) * each_output(cheapest(span, gram=True))
    return total


def each_output(steps: Steps) -> float:
    """Return the operations of an iteration for each output, as projection_steps.py has them."""
    directions, width = steps.span.rows.shape
    clients = len(steps.span.parts)
    if isinstance(steps, PullByPull):
        return 2.0 * directions**2 * (1 - 1 / clients)
    if isinstance(steps, AlongDirections):
        return 4.0 * directions**2
    return 4.0 * directions * width + 2.0 * clients**2 * width


def dense_operations(replies: Sequence[Reply], x: Tensors) -> float:
    """Return those of the released loop."""
    shapes = [x[name].shape for name in projected_layers(replies)]
    return 4.0 * ITERATIONS * len(replies) * sum(out * width**2 for out, width in shapes)


def measure(count: int, options: argparse.Namespace, speed: float) -> list[dict[str, Any]]:
    """Return the figures of N clients, a row for each way."""
    clients = mnist_clients if "FEDHET_DATA" in os.environ else synthetic_clients
    x, replies = clients(count, options)
    null = dense_projectors(replies)
    ours = {
        "full rank": replies,
        f"{100 * options.energy:g} % of the energy": shortened(replies, None, options.energy),
        f"rank {options.rank}": shortened(replies, options.rank, 1.0),
    }
    aggregator = HarmonizedOptima(
        iterations=ITERATIONS, weights="program", cap=CAP, tolerance=0.0, device="cpu"
    )
    clock = Clock(options.clock)
    aggregator(x, ours[f"rank {options.rank}"])  # cvxopt is imported
    dense = [clock.seconds(lambda: released_loop(x, replies, null))]
    times: dict[str, list[float]] = {name: [] for name in ours}
    ratios: dict[str, list[float]] = {name: [] for name in ours}
    for _ in range(options.repeats):
        for name, held in ours.items():
            times[name].append(clock.seconds(lambda held=held: aggregator(x, held)))
        dense.append(clock.seconds(lambda: released_loop(x, replies, null)))
        for name in ours:
            ratios[name].append(2 * times[name][-1] / (dense[-2] + dense[-1]))
    floor = dense_operations(replies, x) / speed
    found = [{"clients": count, "way": "dense loop", "seconds": dense, "floor": floor}]
    for name, held in ours.items():
        with timed(clock) as spent:
            whole = clock.seconds(lambda held=held: aggregator(x, held))
        found.append(
            {
                "clients": count,
                "way": name,
                "seconds": times[name],
                "over_dense": ratios[name],
                "ranks": ranks(held),
                "shares": {part: spent[part] / whole for part in PARTS},
                "floor": operations(held, x) / speed,
            }
        )
    return found


def ranks(replies: Sequence[Reply]) -> list[float]:
    """Return the mean rank of each layer."""
    return [
        statistics.mean(reply.payloads[PROJECTIONS][name].shape[1] for reply in replies)
        for name in projected_layers(replies)
    ]


HEADER = (
    "| clients | way | mean ranks | seconds | over the dense loop | eq. 6, % | Gram, % "
    "| updates, % | reading, % | floor, s |"
)


def row(figures: Mapping[str, Any]) -> str:
    """Return a row of the table."""
    cells = [str(figures["clients"]), figures["way"]]
    cells.append(", ".join(f"{rank:.0f}" for rank in figures.get("ranks", ())))
    cells.append(f"{statistics.median(figures['seconds']):.3f}")
    ratios = figures.get("over_dense")
    cells.append(f"{statistics.median(ratios):.3f}" if ratios else "")
    shares = figures.get("shares", {})
    cells += [f"{100 * shares[part]:.1f}" if shares else "" for part in PARTS]
    return "| " + " | ".join([*cells, f"{figures['floor']:.3f}"]) + " |"


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every N; print and return a row for each way."""
    speed = product_speed()
    lines = [
        f"Products: {speed / 1e9:.0f} GFLOP/s on {options.threads} threads.\n",
        HEADER,
        "|" + "---|" * HEADER.count(" |"),
    ]
    print(*lines, sep="\n", flush=True)
    results = []
    for count in options.clients:
        found = measure(count, options, speed)
        results += found
        for line in map(row, found):
            lines.append(line)
            print(line, flush=True)
    options.out.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return {"results": results, "product_speed": speed}


# ---- a ResNet-18 ---------------------------------------------------------------------------------


@contextmanager
def peak_memory() -> Iterator[dict[str, float]]:
    """Tell by how many MiB the process grew at most inside the block (Linux)."""
    found: dict[str, float] = {}
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    yield found
    found["MiB"] = (_status("VmHWM") - before) / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def resnet(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the client's half and the server's of a ResNet-18's projections."""
    count, rank, images = 10, 32, options.images
    clock = Clock(options.clock)
    model = build_model(
        "resnet18_gn", input_shape=(3, 32, 32), num_classes=10, stem="cifar", seed=0
    )
    pixels = torch.randint(0, 256, (images, 3, 32, 32), dtype=torch.uint8).numpy()
    labels = (torch.arange(images) % 10).numpy()
    plain = Transform(mean=(0.5,) * 3, std=(0.25,) * 3)
    data = TensorData(pixels, labels, num_classes=10, transform=plain)
    side = ProjectionClient(rank=rank, sketch_above=options.sketch_above)
    side.check(model, SGD(), [name for name, _ in model.named_parameters()])
    done: list[Mapping[str, Tensors]] = []
    with peak_memory() as at_client:
        context, summary = context_of(model, data, F.cross_entropy, 0), LocalSummary(images, 1, 0.1)
        client = clock.seconds(lambda: done.append(side.end(context, summary)))
    sent = sum(4 * values.numel() for payload in done[0].values() for values in payload.values())
    whole = sum(4 * value.numel() for value in model.parameters())
    dense = sum(4 * len(values) ** 2 for values in done[0][PROJECTIONS].values())
    x = dict(model.named_parameters())
    x = {name: value.detach() for name, value in x.items()}
    drawn = done[0][PROJECTIONS]

    def reply(i: int) -> Reply:
        generator = torch.Generator().manual_seed(i)
        update = {
            name: 0.1 * torch.randn(value.shape, generator=generator) for name, value in x.items()
        }
        turned = {
            name: values[torch.randperm(len(values), generator=generator)]
            for name, values in drawn.items()
        }
        return Reply(i, images, 1, 0.1, update, {**done[0], PROJECTIONS: turned})

    replies = [reply(i) for i in range(count)]
    found = {"bytes": {"projections": sent, "model": whole, "dense": dense}}
    found["client"] = {"seconds": client, "peak MiB": at_client["MiB"]}
    for weights in ("uniform", "program"):
        aggregator = HarmonizedOptima(weights=weights, tolerance=0.0, device="cpu")
        with peak_memory() as at_server:
            server = clock.seconds(lambda aggregator=aggregator: aggregator(x, replies))
        found[f"server, {weights}"] = {"seconds": server, "peak MiB": at_server["MiB"]}
    text = "\n".join(
        [
            f"ResNet-18, {count} clients, rank {rank}, {images} images each:\n",
            f"- a client sends {sent / 1e6:.1f} MB of projections beside {whole / 1e6:.1f} MB of "
            f"model (dense projections: {dense / 1e6:.0f} MB)",
            *(
                f"- {who}: {figures['seconds']:.1f} s, {figures['peak MiB']:.0f} MiB more at peak"
                for who, figures in found.items()
                if who != "bytes"
            ),
        ]
    )
    print(text)
    options.out.with_suffix(".md").write_text(text + "\n")
    return {"resnet18": found}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file; a .md goes beside it")
    parser.add_argument("--clients", type=int, nargs="+", default=list(FIRST_BETA))
    parser.add_argument("--beta", type=float, help="default: the first of the paper's Table 1")
    parser.add_argument("--form", choices=("ridge", "damped"), default="ridge")
    parser.add_argument("--energy", type=float, default=0.99)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--resnet", action="store_true", help="measure a ResNet-18's projections")
    parser.add_argument("--images", type=int, default=200, help="of each client, with --resnet")
    parser.add_argument("--sketch-above", type=int, default=2304, help="with --resnet")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    result = {
        "options": {**vars(options), "out": str(options.out)},
        "data": "MNIST" if "FEDHET_DATA" in os.environ else "synthetic",
        **(resnet(options) if options.resnet else compare(options)),
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "torch": torch.__version__,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
