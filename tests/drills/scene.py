"""A federation whose clients fail on command, its runs, and the same runs on one machine alone."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from flwr.app import Message, MessageType
from safetensors import safe_open
from safetensors.torch import load_file

from fedhet.common.results import METRICS, read_rows
from fedhet.conf import PACKAGES, compose
from fedhet.server_app.run import Run
from fedhet.strategies.wire.records import CONFIG
from tests.deployed import RECIPE as DEPLOYED
from tests.deployed import ROOT, SITES, Deployment
from tests.drills.faulty.faulty import GO, WAITING
from tests.federation import InProcessGrid
from tests.processes import SECONDS
from tests.recipes import grid_of, overrides

RECIPE = [*DEPLOYED, "strategy=scaffold", "local.epochs=1"]
ROUND_SECONDS = int(os.environ.get("FEDHET_ROUND_SECONDS", "90"))  # more than a good round takes
Rows = list[dict]


class Scene:
    def __init__(self, federation: Deployment) -> None:
        self.federation = federation
        self.server = federation.folder / "server"
        make_app(self.server / "state" / "app")

    def plan(self, site: int, faults: Mapping[int | str, str]) -> None:
        """Set a site's faults, by round, and that of its "card"."""
        for name in (WAITING, GO):
            (self.state(site) / name).unlink(missing_ok=True)
        (self.state(site) / "faults.json").write_text(json.dumps(faults))

    def state(self, site: int) -> Path:
        return self.federation.folder / f"site-{site}" / "state" / "clients"

    def log(self, name: str) -> str:
        return self.federation.log(name)

    def begin(self, name: str, *words: str) -> Submitted:
        """Submit the recipe with further words; name is the results folder's."""
        recipe = [*RECIPE, f"runtime.round_timeout_seconds={ROUND_SECONDS}", *words]
        done = self.federation.flwr_run(recipe, name, "/state/app", "--format", "json")
        assert done.returncode == 0, f"{done.stdout}\n{self.federation.said()}"
        answer = json.loads(done.stdout[done.stdout.index("{") :])
        assert answer.get("success"), answer
        return Submitted(self, name, int(answer["run-id"]), words)

    def begin_and_wait_at_site_1(self, name: str) -> Submitted:
        """Submit three rounds; return when site 1 waits in round 2."""
        self.plan(1, {2: "wait"})
        run = self.begin(name, "rounds=3")
        run.wait_for("site 1 in round 2", lambda rows: (self.state(1) / WAITING).exists())
        return run

    def resume(self, name: str, rounds: int) -> list[str]:
        """Resume a run that has ended, and compare it with an undisturbed one."""
        self.plan(1, {})
        (self.server / "results" / name / "summary.json").unlink(missing_ok=True)
        run = self.begin(name, f"rounds={rounds}", "resume=true")
        summary = run.summary()
        assert summary["status"] == "completed", summary
        assert [row["round"] for row in run.rows()] == list(range(1, rounds + 1))
        return [f"resumed: {summary['rounds']} rounds, {run.bits()}"]


class Submitted:
    def __init__(self, scene: Scene, name: str, run_id: int, words: Sequence[str]) -> None:
        self.scene, self.run_id, self._words = scene, run_id, words
        self.folder = scene.server / "results" / name

    def rows(self) -> Rows:
        """Return the rows of metrics.jsonl, without round 0."""
        path = self.folder / "metrics.jsonl"
        return read_rows(path)[1:] if path.exists() else []

    def wait_for(self, what: str, seen: Callable[[Rows], bool]) -> dict:
        """Wait until the rows satisfy a condition; return the last one."""
        self._wait(what, lambda: bool(self.rows()) and seen(self.rows()))
        return self.rows()[-1]

    def wait_for_round(self, round: int) -> dict:
        self.wait_for(f"round {round}", lambda rows: len(rows) >= round)
        return self.rows()[round - 1]

    def wait_for_client(self, client: int) -> dict:
        """Wait for a round that begins after now and has this client; return its row."""
        first = len(self.rows()) + 1
        return self.wait_for(
            f"client {client}", lambda rows: any(client in row["clients"] for row in rows[first:])
        )

    def summary(self) -> dict:
        path = self.folder / "summary.json"
        self._wait("the end", path.exists, ended=True)
        return json.loads(path.read_text())

    def _wait(self, what: str, done: Callable[[], bool], *, ended: bool = False) -> None:
        end = time.monotonic() + SECONDS
        while not done():
            over = (self.folder / "summary.json").exists()
            said = self.summary() if over and not ended else ""
            assert ended or not over, f"{what}: {said}\n{self.scene.federation.said()}"
            assert time.monotonic() < end, f"{what}: not yet\n{self.scene.federation.said()}"
            time.sleep(0.5)

    def flwr(self, *words: str) -> str:
        done = self.scene.federation.execute("superlink", "flwr", *words)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def stop_and_compare(self) -> str:
        """Stop the run; compare its rounds with those of one machine alone."""
        self.flwr("stop", str(self.run_id), "fedhet")
        return self.bits()

    def ended(self) -> tuple[str, str]:
        """Wait until Flower has ended the run; return its status and why."""
        status = partial(self.scene.federation.run_status, self.run_id)
        self._wait("the end", lambda: status()[0].startswith("finished"), ended=True)
        return status()

    def bits(self) -> str:
        """Compare the last checkpoint and the client states with those of one machine alone.

        There the same clients take part in each round as took part here.
        """
        last = sorted(self.folder.glob("checkpoints/round-*.safetensors"))[-1]
        rounds = int(last.stem.removeprefix("round-"))
        took_part = {row["round"]: row["clients"] for row in self.rows()}
        others = [word for word in self._words if not word.startswith(("rounds=", "resume="))]
        with safe_open(last, framework="pt") as file:
            experiment = json.loads(file.metadata()["fedhet"])["experiment"]
        with tempfile.TemporaryDirectory() as folder:
            alone = Path(folder)
            words = [*RECIPE, *others, f"rounds={rounds}", "max_failed_rounds=1000"]
            run_alone(alone, words, attended(words, took_part))
            scores = [
                [(row["round"], row["accuracy"], row["loss"]) for row in rows[: rounds + 1]]
                for rows in (read_rows(run / METRICS) for run in (self.folder, alone))
            ]
            assert scores[0] == scores[1]
            compared = equal_tensors(last, alone / "checkpoints" / last.name)
            (states,) = (alone / "client_state").iterdir()
            for site in SITES:
                newest = max(t for t, there in took_part.items() if site in there and t <= rounds)
                name = f"client-{site:05d}/round-{newest:06d}.safetensors"
                here = self.scene.state(site) / experiment / name
                compared += equal_tensors(here, states / name)
        return f"bits of one machine alone: {compared} tensors are equal"


def equal_tensors(first: Path, second: Path) -> int:
    """Raise unless two files hold the same tensors; return their number."""
    one, other = load_file(first), load_file(second)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == [], f"{first.name}: {different}"
    return len(one)


def make_app(folder: Path) -> None:
    """Make the project's app with the ClientApp of tests/drills/faulty."""
    leave_out = shutil.ignore_patterns("__pycache__")
    for package in (*PACKAGES, "reproductions", "fedhet"):
        shutil.copytree(ROOT / package, folder / package, symlinks=True, ignore=leave_out)
    shutil.copy(Path(__file__).parent / "faulty" / "faulty.py", folder)
    text = (ROOT / "pyproject.toml").read_text()
    for old, new in (
        ('clientapp = "fedhet.client_app.app:app"', 'clientapp = "faulty:app"'),
        ("fab-include = [", 'fab-include = [\n  "/faulty.py",'),
        ('license-files = ["LICENSE"]', ""),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "pyproject.toml").write_text(text)


# ---- one machine alone ---------------------------------------------------------------------------


def attended(
    words: Sequence[str],
    took_part: Mapping[int, Collection[int]],
    node_config: Callable[[int], dict[str, str]] = lambda client: {},
    before: Mapping[int, Callable[[], object]] | None = None,
) -> InProcessGrid:
    """Return three clients in this process, of which only some take part in a round.

    ``took_part`` has the clients that get messages by round, all of them in other rounds;
    ``before`` what is called before the clients train.
    """
    grid = grid_of(words, len(SITES), node_config=node_config)
    ask = grid.send_and_receive

    def send_and_receive(messages, *, timeout=None):  # type: ignore[no-untyped-def]
        asked: list[Message] = list(messages)
        if asked and asked[0].metadata.message_type == MessageType.TRAIN:
            round = int(asked[0].content.config_records[CONFIG]["round"])
            (before or {}).get(round, bool)()
            here = {100 + client for client in took_part.get(round, SITES)}
            asked = [message for message in asked if message.metadata.dst_node_id in here]
        return ask(asked, timeout=timeout)

    grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    return grid


def run_alone(
    folder: Path, words: Sequence[str], grid: InProcessGrid, last: Path | None = None
) -> None:
    Run(compose(overrides(*words, f"results_dir={folder}")), folder, last).start(grid)
