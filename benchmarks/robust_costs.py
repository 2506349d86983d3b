"""Seconds and memory of each robust aggregator for the updates of one round, beside plain means.

The updates, as many as clients, have the shapes of a ResNet-18 and are drawn. Each rule runs in a
process of its own, forked when the updates are there: its memory is what it adds to them. ``exact``
is the mean that fedhet takes, ``float32`` a running sum.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import torch
from torch import Tensor, nn

from benchmarks.harness import spread
from fedhet.strategies.base import Reply
from fedhet.strategies.modes.robust.aggregator import RobustAggregator
from fedhet.strategies.modes.robust.clipping import CenteredClipping, NormBound
from fedhet.strategies.modes.robust.coordinates import Median, TrimmedMean
from fedhet.strategies.modes.robust.fltrust import FLTrust
from fedhet.strategies.modes.robust.geometric_median import GeometricMedian
from fedhet.strategies.modes.robust.selection import Bulyan, Krum, MultiKrum
from fedhet.strategies.round.reply_fold import Weights, sum_of
from fedhet.strategies.round.server_model import ServerModel
from fedhet.tasks.models.resnet import resnet18_gn

_HOSTILE = 20  # of 100
_MAKE: dict[str, Callable[[], RobustAggregator]] = {
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": lambda: Krum(attackers=_HOSTILE),
    "multi_krum": lambda: MultiKrum(attackers=_HOSTILE),
    "bulyan": lambda: Bulyan(attackers=_HOSTILE),
    "geometric_median": GeometricMedian,
    "centered_clipping": CenteredClipping,
    "norm_bound": NormBound,
    "fltrust": FLTrust,
}


def _model() -> nn.Module:
    return resnet18_gn((3, 32, 32), 10, head_bias=None, stem=None)


def draw(clients: int) -> list[Reply]:
    """Return replies whose updates have a common part, float32."""
    random = torch.Generator().manual_seed(0)
    shapes = {n: p.shape for n, p in _model().named_parameters()}
    common = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}

    def update() -> dict[str, Tensor]:
        return {n: c + torch.randn(c.shape, generator=random) for n, c in common.items()}

    return [Reply(client, 1, 1, 0.1, update()) for client in range(clients)]


def float32_mean(replies: list[Reply]) -> dict[str, Tensor]:
    """Return the mean by a running sum."""
    total = {name: torch.zeros_like(value) for name, value in replies[0].update.items()}
    for reply in replies:
        for name, value in reply.update.items():
            total[name] += value
    return {name: value / len(replies) for name, value in total.items()}


def rules(replies: list[Reply]) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name."""
    params = {name: torch.zeros_like(value) for name, value in replies[0].update.items()}
    total = sum_of(replies[:1], Weights("clients"))

    def combined(make: Callable[[], RobustAggregator]) -> object:
        rule = make()
        rule.init(params)
        if isinstance(rule, FLTrust):
            rule.train = lambda model, round: dict(replies[0].update)
            rule.bind(cast(ServerModel, SimpleNamespace(model=None)))
        return rule.combine(params, total, replies, 1)

    found: dict[str, Callable[[], object]] = {
        "float32": lambda: float32_mean(replies),
        "exact": lambda: sum_of(replies, Weights("clients")),
    }
    return found | {name: (lambda make=make: combined(make)) for name, make in _MAKE.items()}


def _measured(call: Callable[[], object], pipe: Connection) -> None:
    process, most, ended = psutil.Process(), 0, threading.Event()
    before = process.memory_full_info().uss

    def look() -> None:
        nonlocal most
        while not ended.wait(0.2):  # reading it takes a while, of which ``call`` knows nothing
            most = max(most, process.memory_full_info().uss - before)

    thread = threading.Thread(target=look)
    thread.start()
    began, cpu = time.perf_counter(), time.thread_time()
    call()
    seconds, spent = time.perf_counter() - began, time.thread_time() - cpu
    ended.set()
    thread.join()
    pipe.send((seconds, spent, most))


def measure(repeats: int, clients: int = 100) -> dict[str, Any]:
    """Return seconds, CPU seconds and added bytes of each rule, and print them."""
    torch.set_num_threads(1)  # a fork has no threads of its parent's
    replies = draw(clients)
    numbers = sum(value.numel() for value in replies[0].update.values())
    fork = multiprocessing.get_context("fork")
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        for name, call in rules(replies).items():
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_measured, args=(call, theirs))
            process.start()
            seconds, cpu, added = ours.recv()
            process.join()
            of_rule = found.setdefault(name, {"seconds": [], "cpu_seconds": [], "bytes": []})
            for key, value in zip(of_rule, (seconds, cpu, added), strict=True):
                of_rule[key].append(value)
            print(f"{name}: {seconds:.1f} s, CPU {cpu:.1f} s, {added / 2**20:.0f} MiB", flush=True)
    for name, figures in found.items():
        print(f"{name}: {spread(figures['cpu_seconds'], '.1f')} CPU s")
    return {"clients": clients, "numbers": numbers, "hostile": _HOSTILE, "rules": found}


def markdown(path: Path) -> str:
    """Return the stored costs as a table: medians of CPU seconds, over the float32 mean's, MiB."""
    found = json.loads(path.read_text())["rules"]
    seconds = {n: statistics.median(figures["cpu_seconds"]) for n, figures in found.items()}
    lines = ["| rule | CPU s | x `float32` | MiB |", "|---|---|---|---|"]
    for name, own in seconds.items():
        memory = statistics.median(found[name]["bytes"]) / 2**20
        lines.append(f"| `{name}` | {own:.1f} | {own / seconds['float32']:.1f} | {memory:.0f} |")
    return "\n".join(lines) + "\n"
