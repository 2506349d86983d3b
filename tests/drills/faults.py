"""Drills: one function per fault, in a federation of docker/federation.yaml as processes.

    python -m tests.drills.faults [NAME ...]      all drills, or these; prints what was seen

docs/deployment.md has the table; tests/drills/test_small_disks.py fills the disks of a run.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fedhet.common.flower.task_identity import set_identity
from tests.deployed import ACTIVATED, SITES, Deployment
from tests.drills.faulty.faulty import GO, WAITING
from tests.drills.scene import ROUND_SECONDS, Scene

ENDLESS = "rounds=1000"  # for runs that the drill stops
HEARTBEATS = 60  # seconds after which Flower misses a node: two heartbeats


# ---- clients -------------------------------------------------------------------------------------


# What a site sends, and what the server says; test_border.py has the others, in one process.
REFUSED = {
    "nothing": "it is no .npy file of version 1.0",
    "3e38": "holds 3e+38: numbers up to ",
    "forged": "a client may not send its metrics ['accuracy', 'loss', 'round']",
    "too_few": "it lacks the payload 'control_variate_delta'",
    "raise": "the scanner is out of order",
    "huge": "has shape (50000000,), expected",
}


def replies(scene: Scene) -> list[str]:
    """One site sends a bad reply in every round, one joins late with an empty card; restarts."""
    federation, last = scene.federation, len(REFUSED)
    federation.stop("supernode-1")
    scene.plan(0, dict(enumerate(REFUSED, 1)))
    scene.plan(1, {"card": "empty"})
    scene.plan(2, {2: "wait", 4: "wait"})  # until the late site is there, and has answered
    words = "runtime.min_clients=2", f"runtime.connect_timeout_seconds={ROUND_SECONDS // 2}"
    run = scene.begin("replies", f"rounds={last}", *words)
    run.wait_for_round(1)
    federation.start_and_wait("supernode-1")
    (scene.state(2) / GO).touch()
    run.wait_for_round(2)
    (scene.state(2) / GO).unlink()
    answered = "Sending: query message"
    run.wait_for("an answer", lambda rows: answered in scene.log("supernode-1"))
    (scene.state(2) / GO).touch()
    summary = run.summary()
    assert summary["status"] == "completed", summary
    for row, said in zip(run.rows(), REFUSED.values(), strict=True):
        (failure,) = row["failures"]
        assert failure.startswith("client 0: ")
        assert said in failure, failure
        assert (row["clients"], row["absent"]) == ([2], [1])
    assert run.rows()[-1]["bytes_up"] > 200e6
    late = "refused a node that joined late: node "
    log = run.flwr("log", str(run.run_id), "fedhet", "--show")
    assert "its partition-id is missing" in log.partition(late)[2], log
    scene.plan(0, {})
    federation.stop("supernode-2")  # site 2 has a control variate
    federation.kill("clientapp-2")
    federation.start_and_wait("supernode-2", "clientapp-2")
    after = scene.resume("replies", last + 1)
    assert run.rows()[-1]["clients"] == [0, 1, 2]
    assert "lost its state" not in scene.log("clientapp-2")
    seen = [f"round {row['round']}: {said}" for row in run.rows() for said in row["failures"]]
    return [*seen, f"site 2 restarted: all rounds have the bits of one machine ({after[0]})"]


def client_dies_and_hangs(scene: Scene) -> list[str]:
    """A ClientApp whose process ends, and one that never comes back from training."""
    scene.plan(1, {2: "die"})
    scene.plan(2, {3: "hang"})
    run = scene.begin("dies", ENDLESS)
    dead, hung = run.wait_for_round(2), run.wait_for_round(3)
    assert dead["failures"] == ["client 1: error 8: ClientApp stopped responding."]
    assert hung["clients"] == [0, 1]
    assert hung["failures"][0].startswith("client 2: ")
    back = run.wait_for("client 2 again", lambda rows: 2 in rows[-1]["clients"] and len(rows) > 3)
    assert "Timeout (" in scene.log("clientapp-2")
    assert "in train_for_ever" in scene.log("clientapp-2")
    return [
        f"dies: {in_short(dead)}",
        f"hangs: {in_short(hung)}",
        f"it is back in round {back['round']}; its site's log says where it hung",
        run.stop_and_compare(),
    ]


def in_short(row: Mapping[str, object]) -> str:
    return ", ".join(f"{key} {row.get(key)}" for key in ("round", "seconds", "clients", "failures"))


# ---- nodes ---------------------------------------------------------------------------------------


def comings_and_goings(scene: Scene) -> list[str]:
    """A node that joins late, is killed mid-round, freezes, leaves for good, has a new key."""
    federation = scene.federation
    scene.plan(1, {3: "wait"})
    federation.stop("supernode-2")
    patience = f"runtime.connect_timeout_seconds={ROUND_SECONDS // 3}"
    run = scene.begin("goings", ENDLESS, "runtime.min_clients=2", patience)
    first = run.wait_for_round(1)
    assert (first["clients"], first["absent"]) == ([0, 1], [2])
    federation.start_and_wait("supernode-2")
    seen = [f"begins without client 2: {in_short(first)}"]
    # site 1 is killed in round 3
    run.wait_for("site 1 in round 3", lambda rows: (scene.state(1) / WAITING).exists())
    federation.kill("supernode-1", "clientapp-1")
    scene.plan(1, {})
    federation.start("clientapp-1")
    seconds, tries = federation.restart_supernode("supernode-1")
    third = run.wait_for_round(3)
    assert 1 not in third["clients"]
    assert third["failures"][0].startswith("client 1: error 5: Error: Node Unavailable")
    seen += [f"killed mid-round: {in_short(third)}; in again after {seconds:.0f} s, {tries} tries"]
    seen += [f"is back: {in_short(run.wait_for_client(1))}"]
    assert "lost its state" not in scene.log("clientapp-1")
    seen += [f"has joined late: {in_short(run.wait_for_client(2))}"]
    # site 0 is frozen for longer than two heartbeats
    federation.pause("supernode-0", "clientapp-0")
    without = run.wait_for("a round without 0", lambda rows: 0 not in rows[-1]["clients"])
    federation.unpause("supernode-0", "clientapp-0")
    seen += [f"frozen: {in_short(without)}", f"is back: {in_short(run.wait_for_client(0))}"]
    # site 2 leaves for good, and returns with a new key as another node
    node = scene.log("supernode-2").rpartition(ACTIVATED)[2].split()[0]
    federation.kill("supernode-2", "clientapp-2")
    run.flwr("supernode", "unregister", node, "fedhet")
    gone = run.wait_for("a round without 2", lambda rows: rows[-1].get("absent") == [2])
    (federation.folder / "site-2" / "keys" / "node.key").unlink()
    federation.make_keys()
    federation.checked("register")
    federation.start_and_wait("supernode-2", "clientapp-2")
    seen += [f"left for good (unregistered): {in_short(gone)}"]
    seen += [f"again with a new key: {in_short(run.wait_for_client(2))}"]
    return [*seen, run.stop_and_compare()]


# ---- the server's programs -----------------------------------------------------------------------


def serverapp_killed(scene: Scene) -> list[str]:
    """Kill the ServerApp's executor in round 2, start it again, resume."""
    run = scene.begin_and_wait_at_site_1("serverapp")
    scene.federation.kill("serverapp")
    scene.federation.start_and_wait("serverapp")
    status, why = run.ended()
    assert len(run.rows()) == 1
    return [f"run {status}: {why}", *scene.resume("serverapp", 3)]


def superlink_killed(scene: Scene) -> list[str]:
    """Kill the SuperLink in round 2 and start it again."""
    return _killed(scene, "superlink", 0.0)


def gate_killed(scene: Scene) -> list[str]:
    """Kill the gate in round 2 and start it again after 5 s (on the gRPC line nothing needs it)."""
    return _killed(scene, "gate", 5.0)


def _killed(scene: Scene, service: str, down_seconds: float) -> list[str]:
    name = f"{service}_{down_seconds:.0f}"
    run = scene.begin_and_wait_at_site_1(name)
    scene.federation.kill(service)
    time.sleep(down_seconds)
    scene.federation.start_and_wait(service)
    (scene.state(1) / GO).touch()
    status, why = run.ended()
    seen = [f"run {status}: {why}", *map(in_short, run.rows())]
    scene.federation.wait_until_healthy(*(f"supernode-{site}" for site in SITES))
    completed = status == "finished:completed"
    return seen + ([run.bits()] if completed else scene.resume(name, 3))


def superlink_down_for_long(scene: Scene) -> list[str]:
    """The same, for longer than the SuperLink's patience with its clients."""
    return _killed(scene, "superlink", 2.0 * HEARTBEATS)


DRILLS: dict[str, Callable[[Scene], list[str]]] = {
    drill.__name__: drill
    for drill in (
        *(replies, client_dies_and_hangs, comings_and_goings),
        *(serverapp_killed, superlink_killed, superlink_down_for_long, gate_killed),
    )
}


def main() -> None:
    """Run the drills, one after another, up to the first that goes wrong."""
    set_identity()  # for the run on one machine
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fedhet-") as folder, Deployment(Path(folder)) as there:
        scene = Scene(there)
        for name in sys.argv[1:] or DRILLS:
            for site in SITES:
                scene.plan(site, {})
            print(f"\n{name}: {DRILLS[name].__doc__}", flush=True)
            print("", *DRILLS[name](scene), sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
