"""Drills that need a Docker Engine: one function per fault, in docker/federation.yaml.

    python -m tests.drills.container_faults [NAME ...]  all drills, or these; prints what was seen

Those of tests/drills/faults.py run here as well. docs/deployment.md has the table.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml

from fedhet.common.flower.task_identity import set_identity
from tests.deployed import ACTIVATED, SITES, make_keys
from tests.drills import faults
from tests.drills.containers import IMAGE, Containers, build_changed, docker, why_no_engine
from tests.drills.faults import ENDLESS, in_short
from tests.drills.faulty.faulty import GO
from tests.drills.scene import Scene, Submitted
from tests.drills.test_small_disks import fill, small_disk

PAUSE = 20.0  # seconds, less than two heartbeats: nobody misses who is paused for so long
CUT = 90.0  # seconds, more than two heartbeats
# A container has its machine's clock; libfaketime breaks Python's sleep. So Python's own is wrong.
SKEW = """
import datetime, os
class Skewed(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(minutes=int(os.environ["SKEW"]))
datetime.datetime = Skewed
"""


def containers(scene: Scene) -> Containers:
    assert isinstance(scene.federation, Containers)
    return scene.federation


class Watch:
    """What a fault costs client 1 of a run that goes on: rounds and seconds."""

    def __init__(self, run: Submitted) -> None:
        self.run, self.first, self.began = run, len(run.rows()), time.monotonic()

    def recovered(self, what: str) -> str:
        """Wait until client 1 takes part again; tell what was seen."""
        self.run.wait_for_client(1)
        seconds = time.monotonic() - self.began
        rows = self.run.rows()[self.first :]
        lost = [in_short(row) for row in rows if 1 not in row["clients"]]
        without = lost or "no round"
        return f"{what}: client 1 takes part again after {seconds:.0f} s; without it: {without}"


# ---- kill, pause, restart ------------------------------------------------------------------------


def site_programs(scene: Scene) -> list[str]:
    """A SuperNode and its executor: killed, paused and restarted during one run."""
    federation = containers(scene)
    run = scene.begin("site_programs", ENDLESS)
    run.wait_for_round(1)
    seen = []
    for name in ("clientapp-1", "supernode-1"):
        before = restarts(federation, name)
        watch = Watch(run)
        federation.crash(name)
        seen += [watch.recovered(f"{name} killed")]
        assert restarts(federation, name) > before
        seen += [f"  Docker started it {restarts(federation, name) - before} times"]
        watch = Watch(run)
        federation.pause(name)
        time.sleep(PAUSE)
        federation.unpause(name)
        seen += [watch.recovered(f"{name} paused for {PAUSE:.0f} s")]
        watch = Watch(run)
        federation.restart(name)
        seen += [watch.recovered(f"{name} restarted")]
    assert "lost its state" not in scene.log("clientapp-1")
    return [*seen, run.stop_and_compare()]


def restarts(federation: Containers, name: str) -> int:
    return int(federation.inspected(name)["RestartCount"])


def server_programs(scene: Scene) -> list[str]:
    """The SuperLink and the ServerApp's executor: killed, paused and restarted in round 2."""
    federation, seen = containers(scene), []
    ways: dict[str, Callable[[str], object]] = {
        "killed": federation.crash,
        "restarted": federation.restart,
        "paused": lambda name: (
            federation.pause(name),
            time.sleep(PAUSE),
            federation.unpause(name),
        ),
    }
    for name in ("superlink", "serverapp"):
        for what, do in ways.items():
            results = f"{name}_{what}"
            run = scene.begin_and_wait_at_site_1(results)
            began = time.monotonic()
            do(name)
            (scene.state(1) / GO).touch()
            federation.wait_until_healthy(name)
            healthy = time.monotonic() - began
            status, why = run.ended()
            seconds = time.monotonic() - began
            completed = status == "finished:completed"
            rest = [run.bits()] if completed else scene.resume(results, 3)
            seen += [
                f"{name} {what}: healthy after {healthy:.0f} s; run {status} after {seconds:.0f} s"
                f" {why}; {'; '.join(rest)}"
            ]
    return seen


# ---- the network ---------------------------------------------------------------------------------


def network_cut(scene: Scene) -> list[str]:
    """Site 1 loses the network to the server, and gets it back."""
    federation = containers(scene)
    network, container = f"{federation.project}_default", federation.container("supernode-1")
    run = scene.begin("network_cut", ENDLESS)
    run.wait_for_round(1)
    watch = Watch(run)
    docker("network", "disconnect", network, container)
    unhealthy = federation.wait(lambda: not federation.is_healthy("supernode-1"), "unhealthy")
    time.sleep(max(CUT - unhealthy, 0.0))
    docker("network", "connect", network, container)
    seen = [watch.recovered(f"cut off for {CUT:.0f} s; unhealthy after {unhealthy:.0f} s")]
    federation.wait_until_healthy("supernode-1")
    return [*seen, run.stop_and_compare()]


def changed(scene: Scene, name: str, **settings: Any) -> None:
    """Make a container anew with other settings of its service; without any, as it was."""
    path = scene.federation.folder / "changed.yaml"
    path.write_text(yaml.safe_dump({"services": {name: settings}}))
    federation = containers(scene)
    federation.also = [path] if settings else []
    federation.recreate(name)


def wrong_ca(scene: Scene) -> list[str]:
    """Site 1 has the certificate of another CA; then the right one."""
    federation = containers(scene)
    other = scene.federation.folder / "other"
    other.mkdir()
    make_keys(other, "server", "fl.example.org")
    words = [
        word.replace("/run/secrets/ca.crt", "/other/ca.crt").replace("$", "$$")
        for word in federation.services["supernode-1"].words[2:]
    ]
    run = scene.begin("wrong_ca", ENDLESS)
    run.wait_for_round(1)
    watch = Watch(run)
    mount = f"{other}/server/keys/ca.crt:/other/ca.crt:ro"
    changed(scene, "supernode-1", command=words, volumes=[mount])
    federation.wait(lambda: "CERTIFICATE_VERIFY_FAILED" in scene.log("supernode-1"), "refused")
    run.wait_for("a round without 1", lambda rows: rows[-1].get("absent") == [1])
    seen = [f"with another CA: CERTIFICATE_VERIFY_FAILED; {federation.health('supernode-1')}"]
    changed(scene, "supernode-1")
    seen += [watch.recovered("the right CA again")]
    return [*seen, run.stop_and_compare()]


def clock_skew(scene: Scene) -> list[str]:
    """Site 1's clock goes wrong by minutes, then by an hour."""
    federation = containers(scene)
    path = scene.federation.folder / "sitecustomize.py"
    path.write_text(SKEW)
    run = scene.begin("clock_skew", ENDLESS)
    run.wait_for_round(1)
    seen = []
    for minutes in (4, -4, 60, -60):
        changed(
            scene,
            "supernode-1",
            environment={"SKEW": str(minutes), "PYTHONPATH": "/skew:/app"},
            volumes=[f"{path}:/skew/sitecustomize.py:ro"],
        )
        time.sleep(45.0)
        said = [line for line in scene.log("supernode-1").splitlines() if "SuperNode " in line]
        seen += [f"clock {minutes:+} minutes: {said[-1:]}; {federation.health('supernode-1')}"]
    watch = Watch(run)
    changed(scene, "supernode-1")
    seen += [watch.recovered("the right time again")]
    return [*seen, run.stop_and_compare()]


# ---- room ----------------------------------------------------------------------------------------


def full_volume(scene: Scene) -> list[str]:
    """The volume of site 1's state is full for a round; then that of the results."""
    federation, seen = containers(scene), []
    state = federation.folder / "site-1" / "state"
    with small_disk(state, 8) as ballast:
        prepare(state, "clients", "cache")
        federation.recreate("clientapp-1")
        run = scene.begin("full_state", ENDLESS)
        run.wait_for_round(1)
        watch = Watch(run)
        fill(ballast)
        failed = run.wait_for("a failure", lambda rows: bool(rows[-1]["failures"]))
        ballast.unlink()
        seen += [in_short(failed), watch.recovered("room again at the site")]
        seen += [run.stop_and_compare()]
        federation.stop("clientapp-1")
    federation.recreate("clientapp-1")
    results = federation.folder / "server" / "results"
    with small_disk(results, 8) as ballast:
        prepare(results)
        federation.recreate("serverapp")
        run = scene.begin_and_wait_at_site_1("full_results")
        fill(ballast)
        (scene.state(1) / GO).touch()
        status, why = run.ended()
        seen += [f"run {status}: {why}"]
        ballast.unlink()
        seen += scene.resume("full_results", 3)
        federation.stop("serverapp")
    federation.recreate("serverapp")
    return seen


def prepare(folder: Path, *names: str) -> None:
    """Give a new disk the folders and the owner that it had."""
    owner = folder.parent.stat()
    for path in (folder, *(folder / name for name in names)):
        path.mkdir(exist_ok=True)
        os.chown(path, owner.st_uid, owner.st_gid)


def out_of_memory(scene: Scene) -> list[str]:
    """A ClientApp takes more memory than its container may have."""
    federation = containers(scene)
    federation.variables["CLIENTAPP_MEMORY"] = "1g"
    federation.recreate("clientapp-1")
    scene.plan(1, {2: "hog"})
    run = scene.begin("out_of_memory", ENDLESS)
    run.wait_for_round(1)
    watch = Watch(run)
    failed = run.wait_for("a failure", lambda rows: bool(rows[-1]["failures"]))
    seen = [in_short(failed), watch.recovered("1 GB, and a ClientApp that wants more, in round 2")]
    state = federation.state("clientapp-1")
    seen += [f"restarts {restarts(federation, 'clientapp-1')}, OOMKilled {state['OOMKilled']}"]
    seen += [run.stop_and_compare()]
    del federation.variables["CLIENTAPP_MEMORY"]
    federation.recreate("clientapp-1")
    return seen


# ---- an operator's work --------------------------------------------------------------------------


def upgrade(scene: Scene) -> list[str]:
    """A new image between two runs; the second resumes what the first has done."""
    federation = containers(scene)
    run = scene.begin("upgrade", "rounds=2")
    assert run.summary()["status"] == "completed"
    nodes = {node["node-id"] for node in federation.nodes()}
    before = {name: federation.container(name) for name in ("superlink", "clientapp-1")}
    with tempfile.TemporaryDirectory() as folder:
        seconds = build_changed(Path(folder))
    federation.variables["FEDHET_IMAGE"] = f"{IMAGE}-changed"
    began = time.monotonic()
    federation.compose("up", "-d")
    federation.wait_until_healthy(*(f"supernode-{site}" for site in SITES))
    up = time.monotonic() - began
    assert all(federation.container(name) != old for name, old in before.items())
    assert {node["node-id"] for node in federation.nodes()} == nodes
    seen = scene.resume("upgrade", 4)
    assert "lost its state" not in scene.log("clientapp-1")
    return [f"build {seconds:.0f} s, up -d and all healthy {up:.0f} s, the same three nodes", *seen]


def rotations(scene: Scene) -> list[str]:
    """During a run: the server's certificate, site 1's executor's secret, its node's key."""
    federation = containers(scene)
    run = scene.begin("rotations", ENDLESS)
    run.wait_for_round(1)
    certificate = federation.folder / "server" / "keys" / "server.crt"
    before, watch = certificate.read_bytes(), Watch(run)
    federation.checked("keys", "server", "fl.example.org")
    federation.restart("superlink")
    federation.wait_until_healthy("superlink")
    assert certificate.read_bytes() != before
    seen = [watch.recovered("the server's certificate renewed, superlink restarted")]
    watch = Watch(run)
    keys = federation.folder / "site-1" / "keys"
    (keys / "executor.secret").unlink()
    federation.make_keys()
    federation.recreate("supernode-1", "clientapp-1")
    seen += [watch.recovered("another secret of site 1's executor")]
    watch = Watch(run)
    node = scene.log("supernode-1").rpartition(ACTIVATED)[2].split()[0]
    run.flwr("supernode", "unregister", node, "fedhet")
    (keys / "node.key").unlink()
    federation.make_keys()
    federation.checked("register")
    federation.recreate("supernode-1")
    seen += [watch.recovered("another key of site 1's node")]
    return [*seen, run.stop_and_compare()]


DRILLS: Mapping[str, Callable[[Scene], list[str]]] = {
    drill.__name__: drill
    for drill in (
        *(site_programs, server_programs, network_cut, wrong_ca, clock_skew),
        *(full_volume, out_of_memory, upgrade, rotations),
    )
}


def main() -> None:
    """Run the drills, one after another, each in a federation of its own."""
    set_identity()  # for the run on one machine
    torch.set_num_threads(1)
    if problem := why_no_engine():
        sys.exit(problem)
    every = {**DRILLS, **faults.DRILLS}
    for name in sys.argv[1:] or every:
        with tempfile.TemporaryDirectory(prefix="fedhet-") as folder:
            with Containers(Path(folder)) as federation:
                began = time.monotonic()
                print(f"\n{name}: {every[name].__doc__}", flush=True)
                print("", *every[name](Scene(federation)), sep="\n  ", flush=True)
                print(f"  ({time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f})")
            assert federation.left() == []


if __name__ == "__main__":
    main()
