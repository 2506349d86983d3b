"""Replies that the workers add up: the same bits as the server's sum, whoever is lost meanwhile."""

import itertools
import multiprocessing
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedhet.runtimes.local.forked_workers import ForkedWorkers
from fedhet.runtimes.local.protocol import Federation
from fedhet.runtimes.local.shared_memory import Channel, SharedSums, WritableFile
from fedhet.runtimes.local.worker_grid import WorkerGrid
from fedhet.strategies.base import Reply, ReplySum
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold, Weights, sum_of
from fedhet.strategies.wire.border import Expected, ExpectedPayload, Sender
from fedhet.strategies.wire.records import to_record
from tests.fedhet.runtimes.apps import update_of
from tests.refused import refused

CLIENTS, SHAPES = 7, {"w": (300, 300), "b": (3,)}
WEIGHTS = Weights("examples")


@pytest.fixture
def grid(tmp_path: Path) -> Iterator[WorkerGrid]:
    folder = tmp_path / "shared"
    folder.mkdir()
    app = Federation("tests.fedhet.runtimes.apps:numbers", {}, num_clients=CLIENTS)
    grid = WorkerGrid(ForkedWorkers(2, folder), app)
    yield grid
    grid.close()


def settings() -> FoldSettings:
    params = {name: torch.empty(shape, device="meta") for name, shape in SHAPES.items()}
    senders = {client: Sender() for client in range(CLIENTS)}
    extra = ExpectedPayload({"w": (300, 300)})
    return FoldSettings(Expected(params, senders, payloads={"extra": extra}), WEIGHTS, {"extra"})


def messages(round: int = 1, **asked: str) -> dict[int, Message]:
    shared = to_record({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    config = ConfigRecord(
        {"round": round, **{key.replace("_", "-"): v for key, v in asked.items()}}
    )
    return {
        client: Message(
            RecordDict({"params": shared, "config": config}), client + 1, MessageType.TRAIN
        )
        for client in range(CLIENTS)
    }


def expected_sum(*without: int) -> ReplySum:
    replies = []
    for client in set(range(CLIENTS)) - set(without):
        update = update_of(client, SHAPES)
        extra = {"extra": {"w": -update["w"]}}
        replies.append(Reply(client, client + 1, 1, 0.1, update, extra))
    return sum_of(replies, WEIGHTS, {"extra"})


def require_equal(found: ReplyFold, expected: ReplySum) -> None:
    total = found.total()
    assert [r.client_id for r in total.replies] == [r.client_id for r in expected.replies]
    assert [r.norms for r in total.replies] == [r.norms for r in expected.replies]
    for name in SHAPES:
        assert torch.equal(total.update[name], expected.update[name])
    assert torch.equal(total.payloads["extra"]["w"], expected.payloads["extra"]["w"])


def visits(grid: WorkerGrid) -> dict[int, int]:
    return {n - 1: int(s.metric_records["visits"]["count"]) for n, s in grid._states.items()}


@pytest.mark.slow
def test_the_workers_sum_is_the_servers_to_the_bit_and_short_tasks_share_a_message(
    grid, monkeypatch
):
    monkeypatch.setattr("fedhet.runtimes.local.worker_grid._BATCH_SECONDS", 60.0)  # all are short
    sent, send = [], grid._workers.send
    monkeypatch.setattr(
        grid._workers, "send", lambda w, tasks: (sent.append(len(tasks)), send(w, tasks))
    )
    for round in (1, 2, 3):
        sent.clear()
        found = grid.send_and_fold(messages(round), settings())
        require_equal(found, expected_sum())
        assert sum(sent) == CLIENTS
        assert not found.refused
        assert visits(grid) == dict.fromkeys(range(CLIENTS), round)
    assert max(sent) > 1
    refused = grid.send_and_fold(messages(client_2="fail", client_4="nan"), settings())
    require_equal(refused, expected_sum(2, 4))
    assert refused.refused[2].endswith("ValueError: this client cannot")
    assert "NaN" in refused.refused[4]
    assert refused.non_finite == 1


@pytest.mark.slow
def test_a_sum_stays_when_the_workers_overwrite_the_memory_that_they_have_sent_it_in(grid):
    asked = messages()
    first = grid.send_and_fold({0: asked[0]}, settings())
    before = {name: value.clone() for name, value in first.total().update.items()}
    other = grid.send_and_fold({1: asked[1]}, settings()).total().update
    for name, value in first.total().update.items():
        assert torch.equal(value, before[name])
        assert not torch.equal(value, other[name])


def test_memory_that_is_not_there_is_said_before_it_is_written_to(tmp_path):
    with refused("1", "TMPDIR"):
        WritableFile(f"{tmp_path}/full").mapped(1 << 50)


def test_sums_are_read_where_they_were_made(tmp_path):
    near, far = multiprocessing.Pipe()
    sums = SharedSums(f"{tmp_path}/sum")
    sender, receiver = Channel(near, f"{tmp_path}/a", sums), Channel(far, f"{tmp_path}/b")
    for size in (5000, 6000):  # the second needs a larger file
        sums.forget()
        mine = [sums.empty(size), np.arange(size), sums.empty(size), sums.empty(3)]
        mine[0][:], mine[2][:], mine[3][:] = 0, 7, 0
        sender.send(mine)
        theirs = receiver.receive()
        for one, other in zip(mine, theirs, strict=True):
            assert np.array_equal(one, other)
        for one in mine:
            one += 1
        changed = [np.array_equal(one, other) for one, other in zip(mine, theirs, strict=True)]
        assert changed == [True, False, True, False]  # copied are others, and what is small
        with refused("read-only", kind=ValueError):
            theirs[0] += 1
        assert sum(file.stat().st_size for file in tmp_path.glob("a-*")) < 2 * (8 * size + 1000)


@pytest.mark.flower  # a fresh interpreter imports torch: seconds
def test_clients_of_a_lost_worker_are_asked_once_more_and_count_once(grid, tmp_path):
    first = grid.send_and_fold(messages(), settings())
    require_equal(first, expected_sum())
    once = grid.send_and_fold(messages(client_3="die", marker=str(tmp_path / "once")), settings())
    require_equal(once, expected_sum(3) if 3 in once.refused else expected_sum())
    assert visits(grid)[0] == 2
    always = grid.send_and_fold(messages(client_3="die"), settings())
    require_equal(always, expected_sum(3))
    assert "exit code -9" in always.refused[3]
    idle = messages()
    workers, collect = grid._workers, grid._workers.collect

    def killing(chosen):
        workers._processes[chosen[0]].kill()  # with what it has folded
        workers.collect = collect
        return collect(chosen)

    workers.collect = killing
    require_equal(grid.send_and_fold(idle, settings()), expected_sum())


@pytest.mark.flower
def test_a_worker_that_dies_while_it_waits_for_the_other_costs_nothing(grid, tmp_path):
    grid.send_and_fold(messages(), settings())  # from here on it knows who takes long
    workers, wait, marker = grid._workers, grid._workers.wait, tmp_path / "marker"

    def killing(timeout):
        [*idle] = [worker for worker, given in grid._given.items() if not given]
        if len(idle) == 1 and not marker.exists():  # with what it has folded
            workers._processes[idle[0]].kill()
            workers._processes[idle[0]].join()
            marker.touch()
        return wait(timeout)

    workers.wait = killing
    found = grid.send_and_fold(messages(client_5="pause", marker=str(marker)), settings())
    assert marker.exists()
    require_equal(found, expected_sum())
    assert not found.refused


@pytest.mark.flower
def test_a_client_that_takes_too_long_costs_itself_only(grid, monkeypatch):
    # in a message of its own: clients that share one with it are asked once more, and so is it
    monkeypatch.setattr("fedhet.runtimes.local.worker_grid._BATCH_SECONDS", 0.0)
    began = time.monotonic()
    found = grid.send_and_fold(messages(client_5="sleep"), settings(), timeout=2.0)
    require_equal(found, expected_sum(5))
    assert time.monotonic() - began < 40
    require_equal(grid.send_and_fold(messages(), settings(), timeout=20.0), expected_sum())


@pytest.mark.slow
def test_parts_merge_in_any_order_and_split():
    def fold(clients) -> ReplyFold:
        part = ReplyFold(settings())
        for client in clients:
            update = update_of(client, SHAPES)
            part.sum.add(Reply(client, client + 1, 1, 0.1, update, {"extra": {"w": -update["w"]}}))
        return part

    for seed, cut in itertools.product(range(3), (1, 3)):
        order = random.Random(seed).sample(range(CLIENTS), CLIENTS)
        parts = [fold(order[:cut]), fold(order[cut:5]), fold(order[5:])]
        total = ReplyFold(settings())
        for part in parts:
            total.merge(part)
        require_equal(total, expected_sum())
