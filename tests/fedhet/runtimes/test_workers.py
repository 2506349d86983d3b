"""WorkerGrid over forked workers: messages, state, order, and the loss of a worker."""

import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

from fedhet.runtimes.local.forked_workers import ForkedWorkers
from fedhet.runtimes.local.protocol import Federation
from fedhet.runtimes.local.worker_grid import WorkerGrid
from tests.refused import refused

APP = "tests.fedhet.runtimes.apps:app"


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[WorkerGrid]:
    folder = tmp_path / "shared"
    folder.mkdir()
    before = set(psutil.Process().children())
    grid = WorkerGrid(ForkedWorkers(2, folder), Federation(APP, {}, num_clients=5))
    assert len(set(psutil.Process().children()) - before) == 2
    yield grid
    grid.close()
    names = [process.cmdline() for process in set(psutil.Process().children()) - before]
    assert not [name for name in names if not any("resource_tracker" in word for word in name)]


def messages(params: np.ndarray, clients: list[int], **asked: str) -> list[Message]:
    shared = ArrayRecord({"x": Array(params)})
    config = ConfigRecord({name.replace("_", "-"): value for name, value in asked.items()})
    found = []
    for client in clients:
        own = ArrayRecord({"y": Array(np.full(3, client, np.float32))})
        content = RecordDict({"params": shared, "own": own, "config": config})
        found.append(Message(content, client + 1, MessageType.TRAIN))
    return found


def by_client(replies) -> dict[int, Message]:
    return {reply.metadata.src_node_id - 1: reply for reply in replies}


@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 100_000])  # through the pipe, through a file
def test_every_client_gets_its_own_and_the_shared_records_and_its_state(grid, size, tmp_path):
    params = np.arange(size, dtype=np.float32)
    for visit in (1, 2):
        months = 5e6  # seconds; a timer of the system's has 24 days
        asked = messages(params, [0, 1, 2, 3, 4])
        replies = by_client(grid.send_and_receive(asked, timeout=months))
        assert sorted(replies) == [0, 1, 2, 3, 4]
        for client, reply in replies.items():
            values = reply.content.array_records["update"]["x"].numpy()
            assert np.array_equal(values, params + client)
            metrics = reply.content.metric_records["metrics"]
            assert metrics["own"] == 3 * client
            assert metrics["visits"] == visit  # any worker gets the client's Context.state
            assert metrics["num-partitions"] == 5
    pids = {r.content.metric_records["metrics"]["pid"] for r in replies.values()}
    assert os.getpid() not in pids
    with refused("9", "1..5", kind=ValueError):
        grid.push_messages(messages(params, [8]))
    # every push overwrites the files: one per record, two per worker for answers
    assert len(list((tmp_path / "shared").iterdir())) <= 1 + 2 * 2


def test_a_worker_without_room_for_its_answer_says_so_and_how_to_give_it_some(tmp_path):
    """Its files may not be large here, as on a container's small /dev/shm; the server's may."""
    least, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, most))
    workers = ForkedWorkers(1, tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (least, most))
    grid = WorkerGrid(workers, Federation(APP, {}, num_clients=5))
    with refused("worker-0-answer-", "0.4", "TMPDIR"):
        list(grid.send_and_receive(messages(np.zeros(100_000, np.float32), [0])))
    grid.close()


@pytest.mark.slow
def test_a_shared_record_is_placed_once_and_clients_with_more_examples_go_first(grid, monkeypatch):
    questions = [Message(RecordDict(), node, MessageType.QUERY) for node in range(1, 6)]
    assert len(list(grid.send_and_receive(questions))) == 5
    placed, sent, workers = [], [], grid._workers
    place, send = workers.place, workers.send
    monkeypatch.setattr(workers, "place", lambda r: (placed.append(r), place(r))[1])
    monkeypatch.setattr(workers, "send", lambda w, tasks: (sent.extend(tasks), send(w, tasks))[1])
    list(grid.send_and_receive(messages(np.zeros(2, np.float32), [1, 4, 0, 3, 2])))
    assert [task.message.metadata.dst_node_id - 1 for task in sent] == [4, 3, 2, 1, 0]
    assert len(placed) == 1  # "params"; a small record of one client is in its message


@pytest.mark.flower  # a fresh interpreter imports torch: seconds
def test_a_client_that_raises_or_whose_worker_dies_has_an_error_and_the_worker_is_replaced(grid):
    asked = messages(np.zeros(2, np.float32), [0, 1, 2, 3, 4], client_1="fail", client_2="die")
    replies = by_client(grid.send_and_receive(asked))
    assert {client for client, reply in replies.items() if reply.has_content()} == {0, 3, 4}
    assert replies[1].error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    assert replies[1].error.reason == "ValueError: this client cannot"
    assert replies[2].error.code == ErrorCode.CLIENT_APP_CRASHED
    assert "exit code -9 (killed: was there too little memory?)" in str(replies[2].error.reason)
    again = by_client(grid.send_and_receive(messages(np.zeros(2, np.float32), [0, 1, 2, 3])))
    assert all(reply.has_content() for reply in again.values())
    assert len({r.content.metric_records["metrics"]["pid"] for r in again.values()}) == 2


@pytest.mark.flower
def test_a_client_that_takes_too_long_is_given_up(grid):
    asked = messages(np.zeros(2, np.float32), [0, 1, 2, 3], client_3="sleep")
    began = time.monotonic()
    replies = by_client(grid.send_and_receive(asked, timeout=1.0))
    assert sorted(replies) == [0, 1, 2]
    assert time.monotonic() - began < 20
    again = by_client(grid.send_and_receive(messages(np.zeros(2, np.float32), [3, 0])))
    assert sorted(again) == [0, 3]
    assert again[3].content.metric_records["metrics"]["visits"] == 1


@pytest.mark.flower  # in an interpreter of its own: nothing may have run before the fork
def test_the_example_in_the_docs_runs(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "runtimes.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    code += "\nassert result.train_metrics_clientapp[5]['num-examples'] == 1437\nprint('done')\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"
