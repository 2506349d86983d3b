"""Runs of the command on each runtime of one machine: killed, resumed, with the same bits.

test_deployment.py has runtime=deployment.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from flwr.app import Context, RecordDict

from fedhet.common.checksums import read_label
from fedhet.common.results import read_rows
from fedhet.conf import compose
from fedhet.runtimes.deployment.control_client import RunStatus
from fedhet.runtimes.flower_simulation import Simulation
from fedhet.runtimes.local.forked_workers import ForkedWorkers
from fedhet.runtimes.local.protocol import Federation, Workers
from fedhet.runtimes.local.worker_grid import WorkerGrid
from fedhet.server_app import app as server
from fedhet.server_app.checkpoint import checkpoints
from tests.processes import SECONDS, Fork, alive, finish, kill_all, marked, read_until, summary_of
from tests.recipes import TINY, overrides, run_recipe
from tests.refused import refused

pytestmark = [pytest.mark.flower, pytest.mark.timeout(900)]
ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
# A payload both ways, state at the clients, and a part of the clients in each round.
SCAFFOLD = [*TINY, "strategy=scaffold", "clients=5", "participation=0.6"]
# ... and in the state what was left out of each reply
COMPRESSED = [*SCAFFOLD, "strategy/compression=top_k", "strategy.compression.down=int8"]

# One after the other: Ray gives up where a node takes 30 s to start.
RAY = pytest.mark.xdist_group("ray")


# ---- the command ---------------------------------------------------------------------------------


def folders_of(launch: Fork) -> list[Path]:
    name = f"fedhet-{launch.pid}-*"
    return [
        path for parent in ("/dev/shm", tempfile.gettempdir()) for path in Path(parent).glob(name)
    ]


def after_round(round: int, folder: Path, *words: str) -> tuple[Fork, list[psutil.Process]]:
    """Start a run and wait for the end of a round; return the launch and its processes."""
    launch = Fork(folder.parent, *words, "rounds=10000", f"results_dir={folder}")
    read_until(launch, f"round {round:3}/")
    started = psutil.Process(launch.pid).children(recursive=True)
    assert len(started) >= 3, started  # a server and two workers at least
    assert len(folders_of(launch)) == 1
    return launch, started


def leaves_nothing(launch: Fork, started: list[psutil.Process], stop: signal.Signals) -> str:
    """Stop a run, return its output; nothing of it may be left."""
    launch.send_signal(stop)
    code, output = finish(launch)
    expected = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    assert code == expected[stop], output
    psutil.wait_procs(started, timeout=20 if stop == signal.SIGKILL else 0)  # for the watchdog
    assert alive(started) == []
    assert folders_of(launch) == []
    return output


def is_stopped(folder: Path, output: str) -> None:
    """Check what a run leaves that was asked to stop."""
    summary, rows = summary_of(folder), read_rows(folder / "metrics.jsonl")
    assert (summary["status"], summary["rounds"]) == ("stopped", rows[-1]["round"])
    assert f"results_dir={folder} resume=true" in output.partition("\ncontinue fedhet ")[2]
    assert (folder / "plot.png").exists()


def has_the_bits_of_one_process(folder: Path, *words: str) -> None:
    """Compare a run that has ended with one of as many rounds that was never interrupted."""
    found, whole = summary_of(folder), folder.with_name("whole")
    expected = run_recipe(whole, *words, f"rounds={found['rounds']}", clients=5)
    for key in ("parameters_sha256", "fingerprint", "bytes_up", "bytes_down", "failures"):
        assert found[key] == expected[key], key
    rows = [read_rows(run / "metrics.jsonl") for run in (folder, whole)]
    assert [row["accuracy"] for row in rows[0]] == [row["accuracy"] for row in rows[1]]


def resumed_with_the_bits_of_one_process(
    folder: Path, runtime: str, *words: str, **environment: str
) -> str:
    """Resume a run for two more rounds; return its output."""
    rounds = read_rows(folder / "metrics.jsonl")[-1]["round"] + 2
    again = (*words, runtime, "resume=true", f"rounds={rounds}", f"results_dir={folder}")
    launch = Fork(folder.parent, *again, **environment)
    code, output = finish(launch)
    assert code == 0, output
    has_the_bits_of_one_process(folder, *words)
    assert f"round {rounds:3}/{rounds}" in output
    assert f"accuracy       {100 * summary_of(folder)['accuracy']:.2f} %" in output
    assert f"results  {folder}\nplot     {folder}/plot.png\n" in output
    assert {"config.yaml", "log.txt", "model.safetensors", "plot.png"} <= {
        path.name for path in folder.iterdir()
    }
    return output


@pytest.mark.xdist_group("local")
def test_local(tmp_path):
    run = tmp_path / "run"
    launch, started = after_round(2, run, *COMPRESSED, "runtime=local")
    assert "raylet" not in {process.name() for process in started}
    leaves_nothing(launch, started, signal.SIGKILL)
    resumed_with_the_bits_of_one_process(run, "runtime=local", *COMPRESSED)
    other = tmp_path / "other"
    output = leaves_nothing(*after_round(2, other, *SCAFFOLD, "runtime=local"), signal.SIGINT)
    is_stopped(other, output)
    words = ["runtime=local", "local.momentum=0.9", f"results_dir={tmp_path}/failed"]
    code, output = finish(Fork(tmp_path, *SCAFFOLD, *words))
    assert code == 1, output
    assert "fedhet: the run failed: " in output
    assert "momentum" in output
    assert "Traceback" not in output
    assert f"its log: {tmp_path}/failed/log.txt" in output
    assert "momentum" in (tmp_path / "failed" / "log.txt").read_text()
    assert not (tmp_path / "failed" / "plot.png").exists()


@pytest.mark.xdist_group("local")
def test_a_daemon_may_close_the_standard_files(tmp_path):
    closed = "0<&- >&- 2>&-"
    command = f"{BIN / 'fedhet'} {' '.join(TINY)} rounds=1 results_dir={tmp_path}/run {closed}"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=SECONDS).returncode == 0
    assert summary_of(tmp_path / "run")["status"] == "completed"


def two_ray_nodes(pipe: Connection, folder: str) -> None:
    """Be two Ray nodes of two CPUs until told otherwise; send the cluster's address.

    Its files are in a folder of its own: in Ray's, other tests' runs would find it and join.
    """
    os.environ["RAY_TMPDIR"] = folder
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2)
    pipe.send(cluster.address)
    pipe.recv()
    cluster.shutdown()


@pytest.fixture
def address() -> Iterator[str]:
    """Yield the address of a Ray cluster in another process: its threads survive no fork here."""
    here, there = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:  # a short name, for Ray's sockets
        process = fork.Process(target=two_ray_nodes, args=(there, folder))
        process.start()
        yield here.recv()
        here.send("end")
        process.join()


@RAY
def test_ray(tmp_path, request):
    run = tmp_path / "run"
    launch, started = after_round(2, run, *COMPRESSED, "runtime=ray")
    assert "raylet" in {process.name() for process in started}
    for process in started:  # as on a starved machine: they do not see the raylet's end
        if process.name().startswith("ray::"):
            process.suspend()
    psutil.Process(launch.pid).children()[0].kill()  # the server
    leaves_nothing(launch, started, signal.SIGKILL)
    address = request.getfixturevalue("address")
    words = ["runtime=ray", *COMPRESSED]
    resumed_with_the_bits_of_one_process(run, *words, RAY_ADDRESS=address)
    log = (run / "log.txt").read_text()
    assert "Ray: 3 workers on 2 nodes" in log


def test_a_client_that_no_ray_node_has_room_for_is_refused(monkeypatch):
    import ray  # a second

    from fedhet.runtimes.local.ray_workers import _capacity

    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "Resources": {"GPU": 8.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    assert _capacity(1, None) == (2, 0.0)
    with refused("runtime.client_gpus", kind=RuntimeError):
        _capacity(1, 1000.0)


PRIVATE = [
    "task=my_project",
    "strategy=[my_project.method:KeepFeatures,scaffold]",
    "strategy.keepfeatures.weight=2",
    "clients=5",
    "participation=0.6",
    "local.epochs=1",
    "strategy/secure_aggregation=secagg_plus",
    "strategy/differential_privacy=central_fixed",
    "strategy.differential_privacy.noise_multiplier=0.01",
    "strategy.differential_privacy.reproducible_noise=true",
]


@RAY
def test_flower_simulation(own_project):
    """A project's method, whose code travels, with secure sums and central privacy.

    Flower takes long to start, so it starts once: rounds 2 and 3 are its, those around not.
    """
    run, one_process = own_project / "run", partial(run_recipe, clients=5)
    one_process(run, *PRIVATE, "rounds=1")
    launch, started = after_round(3, run, *PRIVATE, "runtime=flower", "resume=true")
    assert {"flower-superlin", "raylet"} <= {process.name() for process in started}
    leaves_nothing(launch, started, signal.SIGKILL)
    row = read_rows(run / "metrics.jsonl")[-1]
    assert "norm_ratio" not in row
    assert "dp_epsilon" in row
    assert read_label(checkpoints(run / "checkpoints")[-1])["round"] >= 2
    one_process(run, *PRIVATE, "resume=true", f"rounds={row['round'] + 1}")
    has_the_bits_of_one_process(run, *PRIVATE)  # masks and keys differ, sums do not


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (RunStatus("finished:failed", "no memory"), "no memory"),
        (RunStatus("finished:stopped"), "finished:stopped"),
        (RunStatus("finished:completed"), "completed, but it wrote no summary"),
    ],
)
def test_the_reason_of_a_failed_simulation_is_flowers(status, reason, tmp_path):
    simulation = Simulation(tmp_path / "log.txt")
    simulation._control = type("Control", (), {"last_status": lambda _: status})()
    assert reason in simulation.failure()


# ---- `flwr run` ----------------------------------------------------------------------------------


@pytest.fixture
def flower_home(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Make a FLWR_HOME with ports of its own; end the SuperLink that `flwr run` leaves behind."""
    home = tmp_path / "flwr"
    yield os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "17391",
        "FLWR_LOCAL_CONTROL_API_PORT": "17393",
        "UV_OFFLINE": "1",
        "HOME": str(tmp_path),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
    }
    kill_all(partial(marked, "FLWR_HOME", str(home)))


def flwr(cwd: Path, environment: dict[str, str], *words: str) -> str:
    """Return what Flower's command prints; if it fails or hangs, say what it has printed."""
    command = [str(BIN / "flwr"), *words]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired as hung:
        printed = b"".join(one or b"" for one in (hung.stdout, hung.stderr))
        pytest.fail(f"flwr {words[0]} hangs: {printed.decode()}")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@RAY
def test_plain_flwr_run(flower_home, tmp_path):
    """No file of the clone changes, nothing is installed, results appear."""
    before = (ROOT / "pyproject.toml").read_text()
    config = 'strategy="fedpvr" rounds=2 local.epochs=1 overrides="strategy.fedpvr.layers=last:1"'
    shown = flwr(tmp_path, flower_home, "run", str(ROOT), "--stream", "--run-config", config)
    (run,) = json.loads(flwr(tmp_path, flower_home, "list", "local", "--format", "json"))["runs"]
    assert run["status"] == "finished:completed", shown
    (folder,) = (tmp_path / "fedhet-results").iterdir()
    summary = summary_of(folder)
    assert (summary["strategy"], summary["rounds"]) == ("fedpvr", 2)
    assert (ROOT / "pyproject.toml").read_text() == before


# ---- kinds of exchange, over forked workers ------------------------------------------------------


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    found = ForkedWorkers(2, tmp_path_factory.mktemp("shared"))
    yield found
    found.close()


@pytest.mark.parametrize(
    "words",
    [
        ["strategy=[feddw,moon]"],  # statistics, and models in the clients' state
        ["strategy=fedper", "partition=iid"],  # a part of the model stays
        ["strategy=local", "partition=iid"],  # nothing is shared
        ["strategy=maecho"],  # factors up
        ["strategy=feddyn"],  # the output model is not the trained one
        ["strategy=fedmrur"],  # a payload down, two passes a step
        ["strategy=scaffold", "runtime.simulation=false"],  # the state travels in the Context
    ],
    ids=" ".join,
)
def test_every_kind_of_exchange_gives_the_same_bits_over_workers(words, workers, tmp_path):
    words = [*TINY, "checkpoint.every=0", *words]
    expected = run_recipe(tmp_path / "expected", *words)
    run_config = overrides(*words, f"results_dir={tmp_path / 'run'}")
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config
    )
    clients = int(compose(run_config).clients)
    server.main(
        WorkerGrid(workers, Federation("fedhet.client_app.app:app", run_config, clients)), context
    )
    found = summary_of(tmp_path / "run")
    for key in ("parameters_sha256", "accuracy", "failures"):
        assert found[key] == expected[key], key
    state_on_disk = (tmp_path / "run" / "client_state").exists()
    assert not (state_on_disk and "runtime.simulation=false" in words)
