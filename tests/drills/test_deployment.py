"""docker/federation.yaml as processes: TLS, node keys, three sites, `fedhet runtime=deployment`.

tests/deployed.py starts the services of the compose file; what its networks let through is tested
in containers (test_containers.py).
"""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from safetensors.torch import load_file

from fedhet.common.flower.line import installed_line
from fedhet.common.results import read_rows
from fedhet.common.run_events import RECORD_FILE
from fedhet.report.site_data import read_site_figures
from fedhet.strategies.wire.tensor_files import parameters_sha256
from tests.deployed import MARKS, RECIPE, ROOT, SITES, Deployment, make_keys
from tests.drills import probe
from tests.drills.faults import replies
from tests.drills.scene import Scene
from tests.processes import SECONDS, finish, read_until, start, summary_of
from tests.recipes import run_recipe

pytestmark = MARKS
# Payloads both ways, statistics, state at the sites.
WORDS = [*RECIPE, "strategy=[feddw,fedpvr]", "local.epochs=1"]
ENDLESS = "rounds=1000"  # however fast they are, the run is there to be followed and stopped
SAME = ("parameters_sha256", "accuracy", "bytes_up", "bytes_down", "failures")


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("federation")) as deployment:
        yield deployment
    assert deployment.left() == []


def status(federation: Deployment, folder: Path) -> str:
    return federation.run_status(json.loads((folder / RECORD_FILE).read_text())["run_id"])[0]


# ---- runs ----------------------------------------------------------------------------------------


def test_a_run_survives_a_broken_tunnel_and_ctrl_c_and_one_that_is_stopped_is_resumed(
    federation, tmp_path
):
    """It ends with the bits of one machine; the launcher fetches all from the server's folder."""
    here, there = tmp_path / "here", tmp_path / "there"
    server = federation.services["superlink"]
    host, _, port = federation.network.translated("127.0.0.1:8000", server).partition(":")
    tunnel = subprocess.Popen(
        [sys.executable, "-m", "tests.tunnel", host, port],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert tunnel.stdin
    assert tunnel.stdout
    words = [
        *WORDS,
        "runtime=deployment",
        f"runtime.address=127.0.0.1:{tunnel.stdout.readline().strip()}",
        f"runtime.root_certificates={federation.folder / 'server' / 'keys' / 'ca.crt'}",
        f"runtime.server_results={there}",
        "runtime.fetch='cp -R {server}/. {here}'",
        f"results_dir={here}",
    ]

    def launch(*more: str) -> subprocess.Popen[str]:
        return start(tmp_path, *words, *more)

    try:
        launched = launch(ENDLESS)
        said = read_until(launched, "round   0/")
        tunnel.stdin.write("cut\n")
        time.sleep(3)
        tunnel.stdin.write("mend\n")
        said += read_until(launched, "round   1/")
        launched.send_signal(signal.SIGINT)
        code, rest = finish(launched)
        assert code == 130, said + rest
        assert f"resume=true results_dir={here}" in rest
        assert (said + rest).count("round   0/") == 1
        run_id = json.loads((here / RECORD_FILE).read_text())["run_id"]
        assert status(federation, here) == "running"

        launched = launch(ENDLESS, "resume=true", "runtime.stop_on_interrupt=true")
        said = read_until(launched, "round ")
        assert json.loads((here / RECORD_FILE).read_text())["run_id"] == run_id
        launched.send_signal(signal.SIGINT)
        code, rest = finish(launched)
        assert code == 130, said + rest
        assert "runtime.stop_on_interrupt" in rest
        assert status(federation, here) == "finished:stopped"
        assert summary_of(here)["status"] == "stopped"
        done = [row["round"] for row in read_rows(here / "metrics.jsonl")]
        assert done == list(range(len(done)))

        rounds = max(len(done) + 2, 4)  # a checkpoint may be one round ahead
        code, said = finish(launch(f"rounds={rounds}", "resume=true"))
        assert code == 0, said + federation.said()
        assert f"round {done[-1]:3}/" not in said
    finally:
        tunnel.kill()
    expected = run_recipe(tmp_path / "alone", *WORDS, f"rounds={rounds}")
    found = summary_of(here)
    assert found["strategy"] == "feddw+fedpvr"
    assert {key: found[key] for key in SAME} == {key: expected[key] for key in SAME}
    assert found["accuracy"] > 0.3
    stored = load_file(here / "model.safetensors")
    assert parameters_sha256(stored) == expected["parameters_sha256"]
    assert (here / "checkpoints" / f"round-{rounds:06}.safetensors").exists()
    [written] = there.iterdir()
    assert read_rows(here / "metrics.jsonl") == read_rows(written / "metrics.jsonl")
    log = (here / "log.txt").read_text()
    assert "fedhet-event" not in log
    assert "Registered 3 clients with" in log
    for site in SITES:  # FedPVR's control variates lie at their sites
        state = federation.folder / f"site-{site}" / "state" / "clients"
        assert list(state.glob(f"*/client-{site:05}/round-{rounds:06}.safetensors"))
        assert not list(state.glob(f"*/client-0000[!{site}]"))
    assert not (written / "client_state").exists()


IMAGES = {0: 3, 1: 5, 2: 9}  # by site; no other three of these numbers have this sum


def write_images(folder: Path, classes: dict[str, int], seed: int) -> None:
    random = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def test_a_sweep_in_the_server_app_container_trains_on_each_sites_own_images(federation):
    """By `docker compose exec serverapp fedhet -m ...`, which shares its results with the server.

    The first job fails; only the server holds the test set.
    """
    for site, count in IMAGES.items():
        mine = federation.folder / f"site-{site}" / "data" / "train"
        write_images(mine, {"cat": count} if site == 1 else {"cat": 1, "dog": count - 1}, site)
    tested = federation.folder / "server" / "data" / "image_folder" / "test"
    write_images(tested, {"cat": 4, "dog": 3}, 7)
    done = federation.execute(
        "serverapp",
        *("python", "-m", "fedhet", "-m", "runtime=deployment", "clients=3"),
        *("runtime.address=127.0.0.1:8000", "hydra.sweep.dir=/results/images", "rounds=1"),
        *("task=image_folder", "task.classes=[cat,dog]", "task.image_size=12", "task.model=mlp"),
        *("partition=site", "strategy=scaffold", "local.momentum=0.9,0", "local.batch_size=2"),
        *("local.epochs=1",),
    )
    assert done.returncode == 1, done.stdout + federation.said()
    assert "the run failed" in done.stdout
    assert "strategy.scaffold.option=II reads" in done.stdout
    assert "Traceback" not in done.stdout
    ended = (federation.folder / "server" / "results" / "images").glob("*/summary.json")
    jobs = {summary_of(path.parent)["status"]: path.parent for path in ended}
    assert jobs.keys() == {"failed", "completed"}
    folder = jobs["completed"]
    assert (folder / "model.safetensors").exists()
    row = read_rows(folder / "metrics.jsonl")[1]
    assert row["num_examples"] == sum(IMAGES.values())
    assert (row["clients"], row["failures"]) == (list(SITES), [])
    assert row["accuracy"] * 7 == pytest.approx(round(row["accuracy"] * 7))
    for site in SITES:
        mine = federation.folder / f"site-{site}"
        assert list((mine / "state" / "clients").glob(f"*/client-{site:05}/*.safetensors"))
        assert not list(mine.rglob("image_folder-test*"))
    for name in ("serverapp", "clientapp-0"):  # executors fork their apps, and log what these say
        words = {" ".join(one.cmdline()) for one in federation.processes(name)}  # its apps have it
        assert len([one for one in words if "fork_executor.py" in one]) == 1, words
        assert "imports torch anew" not in federation.log(name)
    assert "Start `flwr-clientapp` process" in federation.log("clientapp-0")


TABLES = [
    *("task=tabular", "task.target=income", "task.data_options.fit=federated", "partition=site"),
    *("task.data_options.numeric=[age]", "task.data_options.categorical=[town]"),
    *("task.classes=[low,high]", "partition.holdout=0.25", "clients=3", "rounds=2"),
    *("local.epochs=1", "local.batch_size=8", "evaluation.clients=true"),
    *("evaluation.per_client=true", "evaluation.confusion=true"),
    *("runtime.min_clients=2", "runtime.connect_timeout_seconds=30"),
]


def write_tables(folders: list[Path]) -> None:
    """Write a table for each site: site 1 has another order and a town, site 2 lacks a column."""
    random = np.random.default_rng(0)
    for site, folder in enumerate(folders):
        high = random.random(40) < 0.5
        towns = random.choice(["Oslo", "Rome", "Bonn"][: 2 + (site == 1)], 40)
        table = {"age": random.normal(30 + 20 * high, 5), "town": towns}
        frame = pd.DataFrame({**table, "income": np.where(high, "high", "low")})
        columns = (["age", "town", "income"], ["income", "town", "age"], ["town", "income"])[site]
        frame[columns].to_csv(folder / "train.csv", index=False)


def test_each_site_reads_its_own_table_and_one_without_a_column_is_named(federation, tmp_path):
    data = [federation.folder / f"site-{site}" / "data" for site in SITES]
    write_tables(data)
    done = federation.execute(
        "serverapp",
        *("python", "-m", "fedhet", *TABLES, "runtime=deployment", "runtime.channels_last=false"),
        *("runtime.address=127.0.0.1:8000", "results_dir=/results/tables"),
    )
    assert done.returncode == 0, done.stdout + federation.said()
    folder = federation.folder / "server" / "results" / "tables"
    found, rows = summary_of(folder), read_rows(folder / "metrics.jsonl")
    assert "site 2: ConfigError in fedhet.tasks.tables" in (folder / "log.txt").read_text()
    assert "train.csv has no column age" in federation.log("clientapp-2")  # and no further
    assert [row["clients"] for row in rows[1:]] == [[0, 1]] * 2
    expected = run_recipe(
        tmp_path / "alone", *TABLES, node_config=lambda n: {"data-folder": str(data[n])}
    )
    same = ("parameters_sha256", "client_accuracy", "confusion")
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    figures = read_site_figures(folder, rows, found)
    assert [site.name for site in figures.sites] == ["site 0", "site 1"]
    held_out = sum(site.held_out for site in figures.sites)
    assert np.sum(figures.decisions.counts) == np.sum(figures.decisions.at_threshold) == held_out


SECURE = [
    "strategy/secure_aggregation=secagg_plus",
    "strategy.secure_aggregation.max_examples=1000",
]


def test_masked_sums_have_the_bits_of_one_machine(federation, tmp_path):
    """Four messages a round; masks and keys differ, sums do not."""
    words = [*RECIPE, "strategy=scaffold", "local.epochs=1", *SECURE]
    done = federation.execute(
        "serverapp",
        *("python", "-m", "fedhet", *words, "runtime=deployment"),
        *("runtime.address=127.0.0.1:8000", "results_dir=/results/secure"),
    )
    assert done.returncode == 0, done.stdout + federation.said()
    found = summary_of(federation.folder / "server" / "results" / "secure")
    expected = run_recipe(tmp_path / "alone", *words)
    assert {key: found[key] for key in SAME} == {key: expected[key] for key in SAME}


def test_asynchronous_steps_wait_for_no_site(federation):
    """Site 2 stops answering for some steps; its reply then counts, as stale as it is."""
    folder = federation.folder / "server" / "results" / "fedbuff"
    silent = ("clientapp-2", "supernode-2")

    def wait_for(rows: int) -> None:
        deadline = time.monotonic() + SECONDS
        while not (folder / "metrics.jsonl").exists() or len(measured()) < rows:
            assert time.monotonic() < deadline, federation.said()
            time.sleep(0.2)

    def measured() -> list[dict[str, Any]]:
        return read_rows(folder / "metrics.jsonl")

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(
            federation.execute,
            "serverapp",
            *("python", "-m", "fedhet", *RECIPE, "runtime=deployment", "system=none"),
            *("runtime.address=127.0.0.1:8000", "results_dir=/results/fedbuff", "rounds=10"),
            *("strategy=[scaffold,fedbuff]", "strategy.asynchronous.buffer=2", "local.epochs=1"),
            *("local.lr=0.02",),
        )
        wait_for(2)
        federation.pause(*silent)
        try:
            wait_for(len(measured()) + 4)
        finally:
            federation.unpause(*silent)
        done = run.result()
    assert done.returncode == 0, done.stdout + federation.said()
    rows = measured()[1:]
    assert summary_of(folder)["status"] == "completed"
    assert [len(row["clients"]) for row in rows] == [2] * 10
    assert [row["failures"] for row in rows] == [[]] * 10
    [stale] = [row for row in rows if row["max_staleness"] >= 3]
    assert 2 in stale["clients"]
    assert rows[-1]["accuracy"] > rows[0]["accuracy"]
    assert "simulated_seconds" not in rows[-1]


# ---- strangers -----------------------------------------------------------------------------------

needs_gate = pytest.mark.skipif(
    installed_line().has_gate and shutil.which("nginx") is None, reason="nginx is not installed"
)
CA = "--root-certificates=/run/secrets/ca.crt"
KEY = "--auth-supernode-private-key=/run/secrets/node.key"
STRANGERS = {  # changes to supernode-0's command, and what it then says
    "an unregistered key": (
        {KEY: "--auth-supernode-private-key=/stranger/site/keys/node.key"},
        "[code: 2004] Failed to activate SuperNode",
    ),
    "no key": ({KEY: ""}, "[code: 2001] SuperNode authentication is enabled"),
    "the key of a connected node": ({}, "[code: 2004] Failed to activate SuperNode"),
    "another CA": (
        {CA: "--root-certificates=/stranger/server/keys/ca.crt"},
        "CERTIFICATE_VERIFY_FAILED",
    ),
    "no TLS": (
        {CA: "--insecure", KEY: ""},
        "400 Bad Request" if installed_line().has_gate else "Socket closed",
    ),
}


@needs_gate
def test_strangers_are_refused_as_nodes_and_every_key_is_registered_once(federation, tmp_path):
    make_keys(tmp_path, "site", "stranger")
    make_keys(tmp_path, "server", "fl.example.org")
    service = federation.services["supernode-0"]
    own = {"/stranger": tmp_path, "/tmp": tmp_path / "tmp"}
    service = replace(service, mounts={**service.mounts, **own})

    def refused(number: int, changes: dict[str, str]) -> tuple[int, str]:
        changes = {**changes, "--port=9094": f"--port={9194 + number}"}
        assert set(changes) <= set(service.words)
        words = [changes.get(word, word) for word in (*service.words, "--max-retries=1")]
        done = federation.execute_as(service, *filter(None, words))
        return done.returncode, done.stdout

    with ThreadPoolExecutor() as pool:
        changes = [changes for changes, _ in STRANGERS.values()]
        found = dict(zip(STRANGERS, pool.map(refused, range(5), changes), strict=True))
    for name, (_, message) in STRANGERS.items():
        assert found[name][0] == 1, name
        assert message in found[name][1], name
    assert not (tmp_path / "tmp" / "activated").exists()  # so none was healthy
    before = {node["node-id"] for node in federation.nodes()}
    assert federation.checked("register").count("its key was registered before") == len(SITES)
    assert {node["node-id"] for node in federation.nodes()} == before
    assert {node["status"] for node in federation.nodes()} == {"online"}
    assert len(before) == len(SITES)


@needs_gate
def test_a_stranger_with_the_certificate_is_refused_everywhere(federation, tmp_path):
    """On the port that is open to sites; that no other is, test_containers.py shows."""
    make_keys(tmp_path, "site", "stranger")
    address = f"{federation.network.address('network')}:9092"
    ca = str(federation.folder / "server" / "keys" / "ca.crt")
    [public] = (federation.folder / "site-0" / "keys").glob("*.pub")
    lock_out = [ca, str(tmp_path / "site" / "keys" / "node.key"), str(public)]
    codes: dict[str, set[object]] = {}
    if installed_line().has_gate:
        found = probe.status_by_route(address, ca)
        assert found.pop("/v1/fleet/register-node") == 412  # what it lacks: a key
        for path, code in found.items():
            codes.setdefault(path.removeprefix("/v1/").partition("/")[0], set()).add(code)
        assert codes.pop("fleet") == {401, 404}  # a node's calls, and those that no node makes
        assert len(codes) > 2
        assert set().union(*codes.values()) == {404}
        assert probe.activate_by_http(address, *lock_out) == 401
    else:
        for method, code in probe.status_by_method(address, ca).items():
            codes.setdefault(method.partition("/")[0], set()).add(code)
        assert codes == {"Control": {"UNIMPLEMENTED"}, "Fleet": {"UNAUTHENTICATED"}}
        assert probe.activate(address, *lock_out) == "UNAUTHENTICATED: the key of another node"
    assert len(federation.nodes()) == len(SITES)


# ---- bad replies ---------------------------------------------------------------------------------


def test_bad_replies_are_refused_and_a_restarted_site_keeps_its_state(federation):
    """The drill has the assertions; its last line compares with an undisturbed run."""
    seen = replies(Scene(federation))
    assert seen[-1].startswith("site 2 restarted: all rounds have the bits of one machine")
