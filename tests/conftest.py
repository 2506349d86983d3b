"""Fixtures of all tests: Flower's task identity, one thread, a cache folder of their own."""

import logging
from collections.abc import Iterator

import pytest
import torch
from flwr.supercore.task_identity import TaskIdentity

# The files that take longest, first: a worker left with one of them at the end works alone.
LONG = "containers_readme containers deployment every_strategy runtimes tutorial".split()
LONG += "project runs golden generator experiment_files".split()

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the long files first, the longest before the others."""
    order = {f"test_{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep decoded data and partitions of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """Undo what a command that runs in this process sets for itself."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)
