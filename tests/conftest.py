"""Fixtures of all tests: Flower's task identity, one thread, a cache folder of their own.

What takes seconds to import is imported in the fixtures: xdist's first process, which the workers
wait for, needs none of it.
"""

import gc
import logging
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# The files that take longest, first: a worker left with one of them at the end works alone.
LONG = "deployment runtimes tutorial wheel project".split()
LONG += "every_strategy runs golden generator experiment_files flower_apps damaged_files".split()

PROJECT_MODULES = ("my_project", "mine", "other")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the long files first, the longest before the others; keep a file in one worker.

    A test that names a group of its own (xdist_group) may be in another worker than its file.
    """
    order = {f"test_{name}.py": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.name))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage in what the tests make alone, not in what is imported for them: it stays.

    That takes a third of the time of importing.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def one_thread_and_a_task() -> None:
    """Take the place of Flower, which starts an app as a task; leave the other CPUs to workers."""
    import torch
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep decoded data and partitions of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHET_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project on Python's path, with modules of its own that have the names of others'."""
    from fedhet.tools.new import write_project

    found = tmp_path / "my_project"
    write_project(found)
    for name in ("strategies/__init__.py", "client_app.py", "datasets.py", "queue.py"):
        (found / name).parent.mkdir(exist_ok=True)
        (found / name).write_text("raise RuntimeError('this is not the module that was meant')\n")
    monkeypatch.chdir(found)
    monkeypatch.setattr(sys, "path", [*sys.path, str(found)])
    yield found
    for name in [name for name in sys.modules if name.partition(".")[0] in PROJECT_MODULES]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def same_log_level() -> Iterator[None]:
    """Undo what a command that runs in this process sets for itself."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)
