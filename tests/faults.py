"""Faults, one function each, in a federation of docker/federation.yaml as processes.

    python -m tests.faults [NAME ...]      all of them, or these; prints what was seen

docs/deployment.md has the table. Those that need a small disk mount one: as root only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from client_app.app import app as client_app
from common.results import read_rows
from conf import PACKAGES, compose
from server_app.run import Run
from strategies.round.records import CONFIG
from tests.deployed import ACTIVATED, ROOT, SECONDS, SITES, Deployment
from tests.faulty.faulty import GO, WAITING
from tests.federation import InProcessGrid

RECIPE = [
    "task=digits",
    "strategy=scaffold",
    "clients=3",
    "local.epochs=1",
    "local.lr=0.2",
    "local.batch_size=64",
    "runtime.channels_last=false",
]
ROUND_SECONDS = int(os.environ.get("FEDHET_ROUND_SECONDS", "90"))  # more than a good round takes
WITHOUT_END = "rounds=1000"  # of runs that are stopped when all has been seen
SEES_DEATH = 60  # what Flower needs to miss somebody: two heartbeats of 30 s


class Scene:
    """A federation, and the app that goes wrong when it is told to."""

    def __init__(self, federation: Deployment) -> None:
        self.federation = federation
        make_app(federation.folder / "server" / "state" / "app")

    def forget(self) -> None:
        """Let nothing go wrong any more."""
        for site in SITES:
            self.plan(site, {})

    def plan(self, site: int, faults: Mapping[int, str]) -> None:
        """Say what goes wrong at a site, by round."""
        for name in (WAITING, GO):
            (self.state(site) / name).unlink(missing_ok=True)
        (self.state(site) / "faults.json").write_text(json.dumps(faults))

    def state(self, site: int) -> Path:
        """Return the folder of a site's client state."""
        return self.federation.folder / f"site-{site}" / "state" / "clients"

    def begin(self, name: str, *words: str) -> Submitted:
        """Submit the recipe with further words; name is the results folder's."""
        recipe = [*RECIPE, f"runtime.round_timeout_seconds={ROUND_SECONDS}", *words]
        flags = ("--format", "json")
        done = self.federation.flwr_run(recipe, name, "/state/app", *flags)
        assert done.returncode == 0, f"{done.stdout}\n{self.federation.said()}"
        answer = json.loads(done.stdout[done.stdout.index("{") :])
        return Submitted(self, name, int(answer["run-id"]), words)

    def log(self, name: str) -> str:
        """Return what a container has said since it was last started."""
        return self.federation.log_path(name).read_text(errors="replace")


class Submitted:
    """A run of the federation."""

    def __init__(self, scene: Scene, name: str, run_id: int, words: Sequence[str]) -> None:
        self.scene, self.run_id, self._words = scene, run_id, words
        self.folder = scene.federation.folder / "server" / "results" / name

    def rows(self) -> list[dict]:
        """Return the lines of metrics.jsonl, without that of round 0."""
        path = self.folder / "metrics.jsonl"
        return read_rows(path)[1:] if path.exists() else []

    def wait_for(self, what: str, seen: Callable[[list[dict]], bool]) -> dict:
        """Wait until the rounds so far are as wanted; return the last one."""
        self._wait(what, lambda: bool(self.rows()) and seen(self.rows()))
        return self.rows()[-1]

    def wait_for_round(self, round: int) -> dict:
        """Wait for a round's line, and return it."""
        self.wait_for(f"round {round}", lambda rows: len(rows) >= round)
        return self.rows()[round - 1]

    def wait_for_client(self, client: int) -> dict:
        """Wait for a round that has begun after now and has this client in it."""
        done = len(self.rows())
        return self.wait_for(
            f"client {client}",
            lambda rows: any(client in row["clients"] for row in rows[done + 1 :]),
        )

    def summary(self) -> dict:
        """Wait for the end; return summary.json."""
        path = self.folder / "summary.json"
        self._wait("the end", path.exists, ended=True)
        return json.loads(path.read_text())

    def _wait(self, what: str, done: Callable[[], bool], *, ended: bool = False) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            over = (self.folder / "summary.json").exists()
            assert ended or not over, f"{what}: the run is over\n{self.scene.federation.said()}"
            assert time.monotonic() < end, f"{what}: not yet\n{self.scene.federation.said()}"
            time.sleep(0.5)

    def stop(self) -> None:
        """Stop it, as the operator."""
        command = ["flwr", "stop", str(self.run_id), "fedhet"]
        done = self.scene.federation.execute("superlink", *command)
        assert done.returncode == 0, done.stdout

    def log(self) -> str:
        """Return what the ServerApp has said, which Flower keeps."""
        command = ["flwr", "log", str(self.run_id), "fedhet", "--show"]
        return self.scene.federation.execute("superlink", *command).stdout

    def ended(self) -> tuple[str, str]:
        """Wait until Flower has ended the run; return its status and why."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            status, why = self.scene.federation.run_status(self.run_id)
            if status.startswith("finished"):
                return status, why
            time.sleep(10)
        raise AssertionError(f"{status}: not ended\n{self.scene.federation.said()}")

    def require_bits_of_one_machine(self) -> int:
        """Raise unless the last checkpoint and the client states are those of one machine alone.

        There the same clients take part in each round as took part here. Returns the number of
        tensors that were compared.
        """
        last = sorted(self.folder.glob("checkpoints/round-*.safetensors"))[-1]
        rounds = int(last.stem.removeprefix("round-"))
        took_part = {row["round"]: row["clients"] for row in self.rows()}
        others = [word for word in self._words if not word.startswith(("rounds=", "resume="))]
        with tempfile.TemporaryDirectory() as folder:
            alone(Path(folder), [*others, f"rounds={rounds}"], took_part)
            found = {last: Path(folder) / "checkpoints" / last.name}
            found |= self._client_states(Path(folder), took_part, rounds)
            assert len(found) == 1 + len(SITES)
            return sum(equal_tensors(here, there) for here, there in found.items())

    def _client_states(
        self, folder: Path, took_part: Mapping[int, Collection[int]], rounds: int
    ) -> dict[Path, Path]:
        """Return the newest states that count, here and in the folder of a machine alone."""
        (experiment,) = (folder / "client_state").iterdir()
        (about,) = {p.name for p in self.scene.state(0).iterdir() if p.is_dir()} & {
            experiment_of(self.folder)
        }
        found = {}
        for site in SITES:
            last = max(t for t, clients in took_part.items() if site in clients and t <= rounds)
            name = f"client-{site:05d}/round-{last:06d}.safetensors"
            found[self.scene.state(site) / about / name] = experiment / name
        return found


def experiment_of(folder: Path) -> str:
    """Return the name under which the clients of a run keep their state."""
    from safetensors import safe_open

    last = sorted(folder.glob("checkpoints/round-*.safetensors"))[-1]
    with safe_open(last, framework="pt") as file:
        return json.loads(file.metadata()["fedhet"])["experiment"]


def equal_tensors(first: Path, second: Path) -> int:
    """Raise unless two files hold the same tensors; return how many."""
    one, other = load_file(first), load_file(second)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == [], f"{first.name}: {different}"
    return len(one)


def make_app(folder: Path) -> None:
    """Make the project's app with the ClientApp of tests/faulty in the place of its own."""
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=leave_out)
    shutil.copy(ROOT / "tests" / "faulty" / "faulty.py", folder)
    text = (ROOT / "pyproject.toml").read_text()
    for old, new in (
        ('clientapp = "client_app.app:app"', 'clientapp = "faulty:app"'),
        ("fab-include = [", 'fab-include = [\n  "/faulty.py",'),
        ('license-files = ["LICENSE"]', ""),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "pyproject.toml").write_text(text)


# ---- one machine alone ---------------------------------------------------------------------------


class Attended(InProcessGrid):
    """Three clients in this process.

    Args:
        run_config: as Flower's apps get it.
        took_part: by round, the clients whose replies count; of other rounds everybody.
        node_configs: what a node's own config has beside its partition id, by client.
    """

    def __init__(
        self,
        run_config: Mapping[str, str],
        took_part: Mapping[int, Collection[int]],
        node_configs: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # messages carry them
        contexts = {
            site + 1: Context(
                run_id=1,
                node_id=site + 1,
                node_config={
                    "partition-id": site,
                    "num-partitions": len(SITES),
                    **(node_configs or {}).get(site, {}),
                },
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for site in SITES
        }
        super().__init__(
            {n: lambda message, n=n: client_app(message, contexts[n]) for n in contexts}
        )
        self._took_part = took_part

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return super().send_and_receive(filter(self._is_answered, messages), timeout=timeout)

    def _is_answered(self, message: Message) -> bool:
        if message.metadata.message_type != MessageType.TRAIN:
            return True
        round = int(message.content.config_records[CONFIG]["round"])
        return message.metadata.dst_node_id - 1 in self._took_part.get(round, SITES)


def alone(folder: Path, words: Sequence[str], took_part: Mapping[int, Collection[int]]) -> None:
    """Run the recipe in this process.

    Args:
        folder: of the results.
        words: further ones of the recipe.
        took_part: by round, the clients whose replies count.
    """
    recipe = [*RECIPE, *words, "max_failed_rounds=1000", f"results_dir={folder}"]
    run_config = {"overrides": json.dumps(recipe)}
    Run(compose(run_config), folder, None).start(Attended(run_config, took_part))


# ---- faults of clients ---------------------------------------------------------------------------


def replies(scene: Scene) -> list[str]:
    """Clients that raise, send NaN, a payload too few, 200 MB; a restarted node."""
    scene.plan(0, {1: "nan", 2: "too_few"})
    scene.plan(1, {1: "raise", 2: "huge"})
    run = scene.begin("replies", "rounds=2")
    summary = run.summary()
    assert summary["status"] == "completed", summary
    first, second = (sorted(row["failures"]) for row in run.rows())  # as they came in
    assert first[0].startswith("client 0: update ")
    assert first[0].endswith(" holds NaN or Inf")
    assert "client 1: error 2" in first[1]
    assert "the scanner is out of order" in first[1]
    assert second[0] == "client 0: it lacks the payload 'control_variate_delta'"
    assert "has shape (50000000,), expected" in second[1]
    assert run.rows()[1]["bytes_up"] > 200e6
    assert [row["clients"] for row in run.rows()] == [[2], [2]]
    seen = [f"round {row['round']}: {said}" for row in run.rows() for said in row["failures"]]
    return seen + restarted(scene, run)


def restarted(scene: Scene, before: Submitted) -> list[str]:
    """Restart site 2, whose control variate counts, and go on with the run."""
    federation = scene.federation
    federation.stop("supernode-2")
    federation.kill("clientapp-2")
    federation.start_and_wait("supernode-2", "clientapp-2")
    (before.folder / "summary.json").unlink()
    run = scene.begin("replies", "rounds=3", "resume=true")
    summary = run.summary()
    assert summary["status"] == "completed", summary
    assert run.rows()[-1]["clients"] == [0, 1, 2]
    assert "lost its state" not in scene.log("clientapp-2")
    compared = run.require_bits_of_one_machine()
    return [f"site 2 restarted: rounds 1 to 3 have the bits of one machine ({compared} tensors)"]


def client_dies_and_hangs(scene: Scene) -> list[str]:
    """A ClientApp whose process ends, and one that never comes back from training."""
    scene.plan(1, {2: "die"})
    scene.plan(2, {3: "hang"})
    run = scene.begin("dies", WITHOUT_END)
    dead = run.wait_for_round(2)
    assert dead["failures"] == ["client 1: error 8: ClientApp stopped responding."]
    hung = run.wait_for_round(3)
    assert hung["clients"] == [0, 1]
    assert hung["failures"][0].startswith("client 2: ")
    back = run.wait_for("client 2 again", lambda rows: 2 in rows[-1]["clients"] and len(rows) > 3)
    log = scene.log("clientapp-2")
    assert "Timeout (" in log
    assert "in train_for_ever" in log
    run.stop()
    return [
        f"dies: {dead['seconds']:.0f} s, {dead['failures']}",
        f"hangs: {hung['seconds']:.0f} s, {hung['failures']}",
        f"it is back in round {back['round']}; its site's log says where it hung",
        bits(run),
    ]


def bits(run: Submitted) -> str:
    """Return what a comparison with one machine alone has given."""
    return f"bits of one machine alone: {run.require_bits_of_one_machine()} tensors are equal"


# ---- nodes that come and go ----------------------------------------------------------------------


def comings_and_goings(scene: Scene) -> list[str]:
    """A node that joins late, is killed mid-round, freezes, leaves for good, has a new key."""
    federation = scene.federation
    scene.plan(1, {3: "wait"})
    federation.stop("supernode-2")
    patience = f"runtime.connect_timeout_seconds={ROUND_SECONDS // 3}"
    run = scene.begin("goings", WITHOUT_END, "runtime.min_clients=2", patience)
    first = run.wait_for_round(1)
    assert first["clients"] == [0, 1]
    assert first["absent"] == [2]
    federation.start_and_wait("supernode-2")
    seen = [f"begins without client 2: round 1 has absent {first['absent']}"]
    seen += killed(scene, run)
    joined = run.wait_for_client(2)
    seen.insert(1, f"joins late: round {joined['round']} has clients {joined['clients']}")
    seen += frozen(scene, run)
    seen += left_and_replaced(scene, run)
    run.stop()
    return [*seen, bits(run)]


def killed(scene: Scene, run: Submitted) -> list[str]:
    """Kill site 1 in round 3, and let Docker restart it."""
    federation = scene.federation
    waiting = scene.state(1) / WAITING
    run.wait_for("site 1 in round 3", lambda rows: waiting.exists())
    federation.kill("supernode-1", "clientapp-1")
    scene.plan(1, {})
    federation.start("clientapp-1")
    seconds, tries = federation.restart_supernode("supernode-1")
    third = run.wait_for_round(3)
    assert 1 not in third["clients"]
    assert third["failures"][0].startswith("client 1: error 5: Error: Node Unavailable")
    back = run.wait_for_client(1)
    assert "lost its state" not in scene.log("clientapp-1")
    return [
        f"killed mid-round: round 3 takes {third['seconds']:.0f} s, {third['failures']}",
        f"SuperNode let in again after {seconds:.0f} s and {tries} tries; "
        f"client 1 is back in round {back['round']}",
    ]


def frozen(scene: Scene, run: Submitted) -> list[str]:
    """Freeze site 0 for longer than two heartbeats."""
    federation = scene.federation
    federation.pause("supernode-0", "clientapp-0")
    without = run.wait_for("a round without 0", lambda rows: 0 not in rows[-1]["clients"])
    federation.unpause("supernode-0", "clientapp-0")
    back = run.wait_for_client(0)
    return [
        f"frozen: round {without['round']} takes {without['seconds']:.0f} s, "
        f"{without['failures']}; back in round {back['round']}"
    ]


def left_and_replaced(scene: Scene, run: Submitted) -> list[str]:
    """Remove site 2 from the federation; let it come again with a new key, another node."""
    federation = scene.federation
    node = scene.log("supernode-2").rpartition(ACTIVATED)[2].split()[0]
    federation.kill("supernode-2", "clientapp-2")
    done = federation.execute("superlink", "flwr", "supernode", "unregister", node, "fedhet")
    assert done.returncode == 0, done.stdout
    gone = run.wait_for("a round without 2", lambda rows: rows[-1].get("absent") == [2])
    (federation.folder / "site-2" / "keys" / "node.key").unlink()
    federation.make_keys()
    done = federation.run("register")
    assert done.returncode == 0, done.stdout
    federation.start_and_wait("supernode-2", "clientapp-2")
    back = run.wait_for_client(2)
    return [
        f"left for good (unregistered): round {gone['round']} has clients {gone['clients']}, "
        f"absent {gone['absent']}, failures {gone['failures']}",
        f"again with a new key: round {back['round']} has clients {back['clients']}",
    ]


# ---- the server's programs -----------------------------------------------------------------------


def serverapp_killed(scene: Scene) -> list[str]:
    """Kill the ServerApp's executor in round 2, start it again, resume."""
    federation = scene.federation
    scene.plan(1, {2: "wait"})
    run = scene.begin("serverapp", "rounds=3")
    waiting = scene.state(1) / WAITING
    run.wait_for("site 1 in round 2", lambda rows: waiting.exists())
    federation.kill("serverapp")
    began = time.monotonic()
    federation.start_and_wait("serverapp")
    status, why = run.ended()
    seen = [f"run {status} after {time.monotonic() - began:.0f} s: {why}"]
    rows = len(run.rows())
    assert rows == 1
    scene.plan(1, {})
    seen += [f"metrics.jsonl has rounds 1 to {rows}"]
    return seen + resumed(scene, "serverapp", 3)


def resumed(scene: Scene, name: str, rounds: int) -> list[str]:
    """Go on with a run that has ended, and compare it with one that has not."""
    (scene.federation.folder / "server" / "results" / name / "summary.json").unlink(missing_ok=True)
    run = scene.begin(name, f"rounds={rounds}", "resume=true")
    summary = run.summary()
    assert summary["status"] == "completed", summary
    assert [row["round"] for row in run.rows()] == list(range(1, rounds + 1))
    return [f"resumed: {summary['rounds']} rounds, {bits(run)}"]


def superlink_killed(scene: Scene, down_seconds: float = 0.0) -> list[str]:
    """Kill the SuperLink in round 2 and start it again."""
    federation = scene.federation
    scene.plan(1, {2: "wait"})
    name = f"superlink_{down_seconds:.0f}"
    run = scene.begin(name, "rounds=3")
    waiting = scene.state(1) / WAITING
    run.wait_for("site 1 in round 2", lambda rows: waiting.exists())
    federation.kill("superlink")
    began = time.monotonic()
    time.sleep(down_seconds)
    federation.start_and_wait("superlink")
    down = time.monotonic() - began
    (scene.state(1) / GO).touch()
    status, why = run.ended()
    seen = [f"down for {down:.0f} s: run {status}: {why}"]
    seen += [
        f"round {row['round']}: {row['seconds']:.0f} s, clients {row['clients']}, "
        f"failures {row['failures']}"
        for row in run.rows()
    ]
    federation.wait_until_healthy(*(f"supernode-{site}" for site in SITES))
    if status == "finished:completed":
        return [*seen, bits(run)]
    scene.plan(1, {})
    return seen + resumed(scene, name, 3)


def superlink_down_for_long(scene: Scene) -> list[str]:
    """The same, for longer than the SuperLink's patience with its clients."""
    return superlink_killed(scene, 2.0 * SEES_DEATH)


# ---- full disks ----------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Put a disk of that size under a folder; give the path of a file that may fill it."""
    folder.mkdir(parents=True, exist_ok=True)
    options = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder / "ballast"
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(ballast: Path) -> None:
    """Write until the disk is full."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def site_disk_full(scene: Scene) -> list[str]:
    """No room for site 1's control variate, and then there is."""
    with small_disk(scene.state(1), 4) as ballast:
        fill(ballast)
        run = scene.begin("site_disk", WITHOUT_END)
        first = run.wait_for_round(1)
        assert first["clients"] == [0, 2]
        assert "No space left on device" in first["failures"][0]
        ballast.unlink()
        back = run.wait_for("client 1", lambda rows: 1 in rows[-1]["clients"])
        run.stop()
        return [
            f"round 1: {first['failures']}",
            f"back in round {back['round']} after room was made",
            bits(run),
        ]


def results_disk_full(scene: Scene) -> list[str]:
    """No room for what round 2 has measured."""
    results = scene.federation.folder / "server" / "results" / "disk"
    scene.plan(1, {2: "wait"})
    with small_disk(results, 8) as ballast:
        run = scene.begin("disk", "rounds=3")
        waiting = scene.state(1) / WAITING
        run.wait_for("site 1 in round 2", lambda rows: waiting.exists())
        fill(ballast)
        (scene.state(1) / GO).touch()
        status, why = run.ended()
        assert status == "finished:failed"
        assert "No space left on device" in run.log()
        rows = len(run.rows())
        assert rows >= 1
        ballast.unlink()
        scene.plan(1, {})
        seen = [f"run {status}: {why}", f"metrics.jsonl has rounds 1 to {rows}"]
        return seen + resumed(scene, "disk", 3)


def superlink_disk_full(scene: Scene) -> list[str]:
    """No room for the SuperLink's messages, and then there is."""
    federation = scene.federation
    state = federation.folder / "server" / "state"
    federation.stop("superlink")
    with tempfile.TemporaryDirectory() as kept:
        with small_disk_over(state, 64, Path(kept)) as ballast:
            federation.start_and_wait("superlink")
            federation.wait_until_healthy(*(f"supernode-{site}" for site in SITES))
            fill(ballast)
            os.truncate(ballast, ballast.stat().st_size - 8192)  # for the run config
            done = federation.flwr_run([*RECIPE, "rounds=1"], "no_room", "/state/app")
            said = " ".join(f"{done.stdout} {done.stderr}".split())[-300:]
            seen = [f"`flwr run` while full: exit code {done.returncode}: {said}"]
            ballast.unlink()
            seen += [f"had ended, and were started again: {federation.restart_ended(15)}"]
            run = scene.begin("superlink_disk", "rounds=4")
            run.wait_for_round(1)
            fill(ballast)
            time.sleep(75)  # two heartbeats
            alive = federation.is_healthy("superlink")
            ballast.unlink()
            status, why = run.ended()
            rows = run.rows()
            lines = [line for line in scene.log("superlink").splitlines() if "disk is full" in line]
            seen += [f"healthy while full: {alive}; log: {lines[-1] if lines else 'nothing'}"]
            seconds = [f"{row['seconds']:.0f} s" for row in rows]
            seen += [f"run {status}: {why}; rounds of {', '.join(seconds)}"]
            seen += [f"round {row['round']}: {row['failures']}" for row in rows if row["failures"]]
            seen += [f"had ended, and were started again: {federation.restart_ended(15)}"]
            seen += (
                [bits(run)]
                if status == "finished:completed"
                else resumed(scene, "superlink_disk", 4)
            )
            federation.stop("superlink")
            shutil.copytree(state, Path(kept) / "after", ignore=shutil.ignore_patterns("ballast"))
        shutil.copytree(Path(kept) / "after", state, dirs_exist_ok=True)
    federation.start_and_wait("superlink")
    return seen


@contextmanager
def small_disk_over(folder: Path, megabytes: int, kept: Path) -> Iterator[Path]:
    """Put a disk under a folder that holds something, which is then on it."""
    shutil.copytree(folder, kept / "before")
    with small_disk(folder, megabytes) as ballast:
        shutil.copytree(kept / "before", folder, dirs_exist_ok=True)
        yield ballast


# ---- the command ---------------------------------------------------------------------------------

FAULTS: dict[str, Callable[[Scene], list[str]]] = {
    one.__name__: one
    for one in (
        replies,
        client_dies_and_hangs,
        comings_and_goings,
        serverapp_killed,
        superlink_killed,
        superlink_down_for_long,
        site_disk_full,
        results_disk_full,
        superlink_disk_full,
    )
}


def main() -> int:
    """Run the faults, one after another; 0 if all came out as they must."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(FAULTS)}")
    chosen = parser.parse_args().names or list(FAULTS)
    wrong = 0
    with ExitStack() as stack:
        scene = None
        for name in chosen:
            print(f"\n{name}: {FAULTS[name].__doc__}", flush=True)
            began = time.monotonic()
            scene = scene or new_scene(stack)
            scene.forget()
            try:
                seen = FAULTS[name](scene)
            except Exception:
                seen, wrong, scene = [f"WRONG: {traceback.format_exc()[:5000]}"], wrong + 1, None
                stack.close()  # what it has left behind is not to spoil the others
            print("\n".join(f"  {line}" for line in seen), flush=True)
            print(f"  ({time.monotonic() - began:.0f} s)", flush=True)
    return 1 if wrong else 0


def new_scene(stack: ExitStack) -> Scene:
    """Start a federation, which ends with the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedhet-"))
    return Scene(stack.enter_context(Deployment(Path(folder, "federation"))))


if __name__ == "__main__":
    sys.exit(main())
