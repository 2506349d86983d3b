"""What a round of a deployment costs, beside a plain Flower app that moves the same arrays.

    python -m benchmarks deployment [--sizes trivial 20MB 100MB resnet18] [--rounds 5]
                                    [--containers] [--add]

docker/federation.yaml as processes of this machine (tests/deployed.py), or in a Docker Engine from
the image fedhet:test of `make test-docker` (tests/drills/containers.py): SuperLink, executors,
three SuperNodes, TLS, node keys. On it, in turns: ``fedhet runtime=deployment`` (FedAvg on 90
digits, one local step on 8 of them, an MLP of that size or ResNet-18; all else as by default, so
every client evaluates and every round has a checkpoint), and the floor (benchmarks/floor_app:
Flower's own Grid, NumPy, no learning). The first round of a run, in which the app is installed, is
left out. Bytes are those that the SuperLink counts. Memory is each process' own peak (VmHWM), and
CPU seconds are those of the whole run with its start, both read once a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import psutil
from safetensors import safe_open

from benchmarks.floor_app.floor import TOLD
from benchmarks.harness import ROOT, options_of, save, spread
from fedhet.common.results import METRICS, read_rows
from tests.deployed import SITES, Deployment
from tests.drills.containers import Containers

RECIPE = [
    "task=digits",
    "task.train_size=90",
    "task.test_size=50",
    "strategy=fedavg",
    "partition=iid",
    "clients=3",
    "local.epochs=null",
    "local.steps=1",
    "local.batch_size=8",
    "runtime=deployment",
]
SIZES = {  # an MLP's first layer grows with the image
    "trivial": ["task.model=mlp", "task.image_size=8"],
    "20MB": ["task.model=mlp", "task.image_size=127"],
    "100MB": ["task.model=mlp", "task.image_size=286"],
    "resnet18": ["task.model=resnet18_gn"],  # 62 arrays, where the MLP has 4
}
ROLES = {  # by the first of these words in a process' name or command line
    "flower-superlink": "SuperLink",
    "nginx": "gate",
    "flwr-serverapp": "ServerApp",
    "flower-supernode": "SuperNode",
    "flwr-clientapp": "ClientApp",
    "flower-superexec": "executor",
    "fork_executor.py": "fork server",
}


@dataclass
class Measured:
    """One run.

    Attributes:
        app: fedhet or floor.
        where: in containers or as processes.
        size: of the model.
        model_bytes: of its tensors.
        seconds: of each exchange and aggregation, from the second round on.
        round_seconds: from the end of a round to that of the next, with all that is done between:
            evaluation at the server, checkpoint, results; the floor's are its ``seconds``.
        received: bytes a round that the SuperLink got, from nodes and ServerApp.
        sent: bytes a round that it gave out.
        peak_mb: peak resident memory by kind of process, of the largest one.
        load: of the machine, when the run began.
        cpu_seconds: of the run, by kind of process.
    """

    app: str
    where: str
    size: str
    model_bytes: int
    seconds: list[float]
    round_seconds: list[float]
    received: float
    sent: float
    peak_mb: dict[str, float]
    load: float
    cpu_seconds: dict[str, float] = field(default_factory=dict)


class Watch:
    """Peak resident memory and CPU time of the processes of a deployment while a block runs."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._over = threading.Event()
        self._before: dict[psutil.Process, float] = {}
        self._seen: dict[psutil.Process, tuple[str, float]] = {}
        self.peak_mb: dict[str, float] = {}

    def __enter__(self) -> Watch:
        """Begin."""
        for process in self._deployment.all_processes():
            with contextlib.suppress(psutil.Error, OSError):  # sets VmHWM to what it is now
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
                self._before[process] = cpu_seconds(process)
        self._thread = threading.Thread(target=self._look_on)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """End."""
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(1.0):
            for process in self._deployment.all_processes():
                with contextlib.suppress(psutil.Error, OSError, IndexError, StopIteration):
                    words = " ".join([process.name(), *process.cmdline()])
                    status = Path(f"/proc/{process.pid}/status").read_text()
                    peak = float(status.split("VmHWM:")[1].split()[0]) / 1000
                    role = next(role for program, role in ROLES.items() if program in words)
                    self.peak_mb[role] = max(self.peak_mb.get(role, 0.0), peak)
                    self._seen[process] = role, cpu_seconds(process)

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds by kind of process."""
        found: dict[str, float] = {}
        for process, (role, seconds) in self._seen.items():
            found[role] = found.get(role, 0.0) + seconds - self._before.get(process, 0.0)
        return found


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds that a process has used, its ended children left out."""
    times = process.cpu_times()
    return float(times.user + times.system)


def ours(deployment: Deployment, size: str, rounds: int, name: str) -> Measured:
    """Measure a run of fedhet, launched beside the ServerApp's executor."""
    folder = deployment.folder / "server" / "results" / name
    load = os.getloadavg()[0]
    words = [
        *RECIPE,
        *SIZES[size],
        f"rounds={rounds}",
        "runtime.address=127.0.0.1:8000",
        f"results_dir=/results/{name}",
    ]
    with Watch(deployment) as watch:
        done = deployment.execute("serverapp", "fedhet", *words)
    if done.returncode != 0:
        raise RuntimeError(f"the run has failed: {done.stdout}\n{deployment.said()}")
    rows = read_rows(folder / METRICS)
    ends = [row["elapsed_seconds"] for row in rows[1:]]
    run_id = json.loads((folder / "deployment.json").read_text())["run_id"]
    received, sent = traffic(deployment, run_id)
    return Measured(
        app="fedhet",
        where=where(deployment),
        size=size,
        model_bytes=sum(4 * math.prod(shape) for shape in shapes(folder)),
        seconds=[row["seconds"] for row in rows[2:]],
        round_seconds=[after - before for before, after in pairwise(ends)],
        received=received / rounds,
        sent=sent / rounds,
        peak_mb=watch.peak_mb,
        load=load,
        cpu_seconds=watch.cpu_seconds(),
    )


def floor(deployment: Deployment, size: str, rounds: int, model: list[list[int]]) -> Measured:
    """Measure a run of the plain app."""
    load = os.getloadavg()[0]
    config = deployment.folder / "server" / "state" / "floor.toml"
    config.write_text(f"shapes = '{json.dumps(model)}'\nnodes = {len(SITES)}\nrounds = {rounds}\n")
    app = deployment.folder / "server" / "state" / "floor_app"
    shutil.copytree(ROOT / "benchmarks" / "floor_app", app, dirs_exist_ok=True)
    words = ["flwr", "run", "/state/floor_app", "fedhet", "--stream"]
    with Watch(deployment) as watch:
        done = deployment.execute("superlink", *words, "--run-config", "/state/floor.toml")
    lines = [line.partition(TOLD)[2] for line in done.stdout.splitlines() if TOLD in line]
    rows = [json.loads(line) for line in lines]
    if [row["replies"] for row in rows] != [len(SITES)] * rounds:
        raise RuntimeError(f"the floor's run has failed: {done.stdout}\n{deployment.said()}")
    run_id = int(done.stdout.partition("Successfully started run ")[2].split()[0])
    received, sent = traffic(deployment, run_id)
    seconds = [row["seconds"] for row in rows[1:]]
    return Measured(
        app="floor",
        where=where(deployment),
        size=size,
        model_bytes=sum(4 * math.prod(shape) for shape in model),
        seconds=seconds,
        round_seconds=seconds,
        received=received / rounds,
        sent=sent / rounds,
        peak_mb=watch.peak_mb,
        load=load,
        cpu_seconds=watch.cpu_seconds(),
    )


def where(deployment: Deployment) -> str:
    """Return what a deployment consists of."""
    return "containers" if isinstance(deployment, Containers) else "processes"


def traffic(deployment: Deployment, run_id: int) -> tuple[int, int]:
    """Return the bytes that the SuperLink got and gave out for a run."""
    words = ["flwr", "list", "fedhet", "--run-id", str(run_id), "--format", "json"]
    said = deployment.execute("superlink", *words).stdout
    counted = json.loads(said[said.index("{") :])["runs"][0]["network-traffic"]
    return int(counted["inbound-bytes"]), int(counted["outbound-bytes"])


def shapes(folder: Path) -> list[list[int]]:
    """Return the shapes of a stored model's tensors."""
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return [list(file.get_slice(name).get_shape()) for name in file.keys()]


def runs(options: argparse.Namespace) -> Iterator[Measured]:
    """Yield every run of both apps, in turns."""
    kind = Containers if options.containers else Deployment
    with tempfile.TemporaryDirectory() as scratch, kind(Path(scratch)) as deployment:
        for size in options.sizes:
            for number in range(options.repeats):
                name = f"{size}-{number}"
                yield ours(deployment, size, options.rounds, name)
                model = shapes(deployment.folder / "server" / "results" / name)
                yield floor(deployment, size, options.rounds, model)


def table(found: list[Measured]) -> str:
    """Return the runs as a table in Markdown: medians over all rounds, peaks over all runs.

    Seconds have their mean, too: Flower's intervals of 3 s make a round of the floor with a small
    model 3.4 or 6.4 s long, and the median jumps between the two.
    """
    lines = ["| | fedhet | floor | ratio |", "| --- | --- | --- | --- |"]
    for place, size in dict.fromkeys((run.where, run.size) for run in found):
        mine, theirs = (
            [r for r in found if (r.app, r.where, r.size) == (app, place, size)] for app in APPS
        )
        about = f"{size}: {mine[0].model_bytes / 1e6:.1f} MB, {len(mine)} runs in turn, {place}"
        lines.append(f"| **{about}** | | | |")
        for title, key in (
            ("exchange and aggregation, s", "seconds"),
            ("whole round, s", "round_seconds"),
        ):
            a, b = ([s for run in group for s in getattr(run, key)] for group in (mine, theirs))
            lines.append(
                _row(f"{title}, mean", f"{mean(a):.2f}", f"{mean(b):.2f}", mean(a) / mean(b))
            )
            lines.append(_row(title, spread(a, ".1f"), spread(b, ".1f"), median(a) / median(b)))
        for title, key in (("to the SuperLink, MB/round", "received"), ("from it", "sent")):
            c, d = (median([getattr(run, key) / 1e6 for run in g]) for g in (mine, theirs))
            lines.append(_row(title, f"{c:.2f}", f"{d:.2f}", c / d))
        for role in ROLES.values():
            e, f = (max(run.peak_mb.get(role, 0.0) for run in g) for g in (mine, theirs))
            if e and f:  # both seen
                lines.append(_row(f"{role}, peak MB", f"{e:.0f}", f"{f:.0f}", e / f))
        cpu = [median([sum(run.cpu_seconds.values()) for run in g]) for g in (mine, theirs)]
        if all(cpu):  # measured since 2026-11-28
            lines.append(_row("CPU s of a run", f"{cpu[0]:.0f}", f"{cpu[1]:.0f}", cpu[0] / cpu[1]))
    return "\n".join(lines)


APPS = ("fedhet", "floor")
mean, median = statistics.mean, statistics.median


def _row(title: str, mine: str, theirs: str, ratio: float) -> str:
    return f"| {title} | {mine} | {theirs} | {ratio:.2f} |"


def main() -> None:
    """Measure, and write benchmarks/deployment.json."""
    parser = options_of(__doc__, "deployment", repeats=3)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--containers", action="store_true", help="in a Docker Engine")
    parser.add_argument("--add", action="store_true", help="keep the runs that the file has")
    options = parser.parse_args()
    found = stored(options.out) if options.add else []
    for run in runs(options):
        found.append(run)
        print(f"{run.app} {run.size}: {spread(run.seconds, '.1f')} s; load {run.load:.1f}")
        save(options.out, {"runs": [asdict(one) for one in found]})
    print(table(found))


def stored(path: Path) -> list[Measured]:
    """Return the runs of a file."""
    return [Measured(**one) for one in json.loads(path.read_text())["runs"]]
