"""Every recipe gives the same bits on every runtime: one process, local, Ray on two nodes, Flower."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from flwr.app import Context, RecordDict

from conf import compose_overrides
from experiments.engine.forked import ForkedWorkers
from experiments.engine.grid import WorkerGrid
from experiments.engine.tasks import Federation, Workers
from experiments.simulation import Simulation
from server_app import app as server
from tests.recipes import TINY, overrides, run_recipe
from tests.test_every_strategy import WORDS, name_of

CLIENTS = 3
SHORT = [*TINY, "evaluation.every=0", "checkpoint.every=0"]


@lru_cache(maxsize=64)
def reference(*words: str) -> str:
    """Return the hash of the parameters that one process gives."""
    with TemporaryDirectory() as folder:
        return run_recipe(Path(folder) / "run", *SHORT, *words)["parameters_sha256"]


def run_over(workers: Workers, folder: Path, words: list[str]) -> dict:
    """Run a recipe over workers; return its summary."""
    run_config = overrides(*SHORT, *words, f"results_dir={folder}")
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=run_config
    )
    server.main(WorkerGrid(workers, Federation("client_app.app:app", run_config, CLIENTS)), context)
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    workers = ForkedWorkers(2, tmp_path_factory.mktemp("shared"))
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def on_two_ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    from ray.cluster_utils import Cluster

    from experiments.engine.ray_actors import Needs, RayWorkers

    quiet = {"num_cpus": 1, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=quiet)
    cluster.add_node(num_cpus=1)
    shared = tmp_path_factory.getbasetemp()
    workers = RayWorkers(2, Needs(), shared_folder=shared, address=cluster.address)
    nodes = {workers._check(worker) for worker in range(2)}
    assert len(nodes) == 2
    yield workers
    workers.close()
    cluster.shutdown()


@pytest.fixture(scope="module")
def flower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulation]:
    with Simulation(tmp_path_factory.mktemp("flower") / "log.txt") as simulation:
        yield simulation


@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_local(words, forked, tmp_path):
    summary = run_over(forked, tmp_path / "run", words)
    assert summary["failures"] == 0
    assert summary["parameters_sha256"] == reference(*words)


@pytest.mark.flower
@pytest.mark.timeout(600)
@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_ray(words, on_two_ray_nodes, tmp_path):
    summary = run_over(on_two_ray_nodes, tmp_path / "run", words)
    assert summary["failures"] == 0
    assert summary["parameters_sha256"] == reference(*words)


@pytest.mark.flower
@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_flower(words, flower, tmp_path):
    typed = (*SHORT, *words, "runtime.num_cpus=2", f"results_dir={tmp_path / 'run'}")
    flower.submit(compose_overrides(typed), typed)
    while flower.running():
        time.sleep(0.1)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed", summary
    assert summary["parameters_sha256"] == reference(*words)


def test_state_in_the_messages_gives_the_same(forked, tmp_path):
    """Without a shared disk what SCAFFOLD keeps at a client is in its Context.state."""
    words = ["strategy=scaffold", "runtime.simulation=false"]
    summary = run_over(forked, tmp_path / "run", words)
    assert not (tmp_path / "run" / "client_state").exists()
    assert summary["parameters_sha256"] == reference("strategy=scaffold")
