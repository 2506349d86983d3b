"""What every test needs: Flower's task identity, one thread, a cache folder of the tests' own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity

from tests.deployed import Deployment

# In the order of their time: who is left with one of them at the end works alone.
LONG = [
    f"test_{name}.py"
    for name in (
        "tutorial",
        "deployment",
        "runtimes",
        "namespaces",
        "sweep_runs",
        "golden",
    )
]

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the long files first, the longest before the others."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Start docker/federation.yaml as processes, for the tests of one file."""
    with Deployment(tmp_path_factory.mktemp("federation")) as deployment:
        yield deployment
    assert deployment.left() == []


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep decoded data and partitions of the tests out of the user's cache."""
    before = os.environ.get("FEDHET_CACHE")
    os.environ["FEDHET_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["FEDHET_CACHE"]
    else:
        os.environ["FEDHET_CACHE"] = before
