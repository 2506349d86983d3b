"""A recipe of every method gives the same bits in one process and on local; one for each kind of
exchange also on Ray (two nodes); and some of them on Flower, where a run takes 20 seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from flwr.app import Context, RecordDict

from conf import compose, compose_overrides
from fedhet.runtimes.flower_simulation import Simulation
from fedhet.runtimes.local.forked_workers import ForkedWorkers
from fedhet.runtimes.local.protocol import Federation, Workers
from fedhet.runtimes.local.worker_grid import WorkerGrid
from server_app import app as server
from tests.recipes import TINY, overrides, run_recipe
from tests.test_every_strategy import ALONE, METHODS, name_of

# Of what travels and is kept: statistics, and whole models in the clients' states; a part that
# stays; factors up; another model given out than trained. tests/test_real_flower.py has a payload
# both ways.
ON_FLOWER = [
    ["strategy=[feddw,moon]"],
    *(ALONE[f"strategy={method}"] for method in ("fedper", "maecho", "feddyn")),
]
# And nothing shared; a payload both ways; one down, and two passes a step.
ON_RAY = ON_FLOWER + [ALONE[f"strategy={method}"] for method in ("local", "scaffold", "fedmrur")]
SHORT = [*TINY, "evaluation.every=0", "checkpoint.every=0"]


@lru_cache(maxsize=64)
def reference(*words: str) -> tuple[str, float]:
    """Return what one process gives, as ``outcome`` has it."""
    with TemporaryDirectory() as folder:
        return outcome(run_recipe(Path(folder) / "run", *SHORT, *words))


def outcome(summary: dict) -> tuple[str, float]:
    """Return the parameters' hash, and the accuracy: where nothing is shared, all there is."""
    return summary["parameters_sha256"], summary["accuracy"]


def run_over(workers: Workers, folder: Path, words: list[str]) -> dict:
    """Run a recipe over workers; return its summary."""
    run_config = overrides(*SHORT, *words, f"results_dir={folder}")
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config
    )
    clients = int(compose(run_config).clients)
    server.main(WorkerGrid(workers, Federation("client_app.app:app", run_config, clients)), context)
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = ForkedWorkers(2, tmp_path_factory.mktemp("shared"))
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def two_ray_nodes() -> Iterator[str]:
    """Start two Ray nodes of two CPUs on this machine; give the cluster's address."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2)
    yield cluster.address
    cluster.shutdown()


@pytest.fixture(scope="module")
def on_two_ray_nodes(
    two_ray_nodes: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Workers]:
    from fedhet.runtimes.local.ray_workers import Needs, RayWorkers

    shared = tmp_path_factory.getbasetemp()
    workers = RayWorkers(2, Needs(), shared_folder=shared, address=two_ray_nodes)
    assert len(set(workers.nodes)) == 2
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulation]:
    with Simulation(tmp_path_factory.mktemp("flower") / "log.txt") as simulation:
        yield simulation


@pytest.mark.flower
@pytest.mark.parametrize("words", METHODS, ids=name_of)
def test_local(words, forked, tmp_path):
    summary = run_over(forked, tmp_path / "run", words)
    assert summary["failures"] == 0
    assert outcome(summary) == reference(*words)


@pytest.mark.flower
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", ON_RAY, ids=name_of)
def test_ray(words, on_two_ray_nodes, tmp_path):
    summary = run_over(on_two_ray_nodes, tmp_path / "run", words)
    assert summary["failures"] == 0
    assert outcome(summary) == reference(*words)


@pytest.mark.flower
def test_the_command_uses_the_cluster_of_ray_address(two_ray_nodes, tmp_path):
    words = [*SHORT, "clients=2", "strategy=scaffold", "runtime=ray", f"results_dir={tmp_path}/a"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("fedhet")), *words],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": two_ray_nodes},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ray: 2 workers on 2 nodes" in (tmp_path / "a" / "log.txt").read_text()
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    alone = run_recipe(tmp_path / "b", *SHORT, "clients=2", "strategy=scaffold", clients=2)
    assert summary["parameters_sha256"] == alone["parameters_sha256"]


@pytest.mark.flower
@pytest.mark.parametrize("words", ON_FLOWER, ids=name_of)
def test_flower(words, flower, tmp_path):
    typed = (*SHORT, *words, "runtime.num_cpus=2", f"results_dir={tmp_path / 'run'}")
    flower.submit(compose_overrides(typed), typed)
    while flower.running():
        time.sleep(0.1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed", summary
    assert outcome(summary) == reference(*words)


@pytest.mark.flower
@pytest.mark.parametrize("shared_disk", [True, False])
def test_scaffold_on_workers(forked, tmp_path, shared_disk):
    """Without a shared disk what SCAFFOLD keeps at a client is in its Context.state."""
    words = ["strategy=scaffold", f"runtime.simulation={str(shared_disk).lower()}"]
    summary = run_over(forked, tmp_path / "run", words)
    assert (tmp_path / "run" / "client_state").exists() == shared_disk
    assert outcome(summary) == reference("strategy=scaffold")
