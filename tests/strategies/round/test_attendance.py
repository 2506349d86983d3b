"""Nodes that are late, gone, or somebody else's: who takes part in a round."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Error, Message

from common.errors import ConfigError
from strategies.components.samplers import FixedSizeSampler
from strategies.fedavg import FedAvg
from strategies.round.records import to_record
from strategies.round.registration import ClientRegistry, LateJoiners, register_clients
from tests.federation import InProcessGrid, node_info
from tests.strategies.round.test_round import run


class Changing(InProcessGrid):
    """Nodes by partition id, who come and go; questions are answered when they are pulled."""

    def __init__(self, *there: int, size: int = 3, **mine: str) -> None:
        super().__init__({})
        self.size, self.mine = size, mine
        self.asked: dict[str, Message] = {}
        for client in there:
            self.join(100 + client, client)

    def join(self, node: int, client: int, **more: str) -> None:
        content = node_info(client, self.size, 10 + client, **{**self.mine, **more})
        self.handlers[node] = lambda message: Message(content, reply_to=message)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        new = {f"question {len(self.asked) + i}": one for i, one in enumerate(messages)}
        for message_id, message in new.items():
            message.metadata.__dict__["_message_id"] = message_id
        self.asked |= new
        return list(new)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        asked = [self.asked[one] for one in message_ids]
        return [self.handlers[m.metadata.dst_node_id](m) for m in asked]


# ---- before round 1 ------------------------------------------------------------------------------


def test_enough_clients_begin_without_the_others():
    registry = register_clients(Changing(0, 2), 3, {}, 0.1, min_clients=2)
    assert registry.nodes == {0: 100, 2: 102}
    assert len(registry) == 3


def test_fewer_than_enough_do_not():
    with pytest.raises(TimeoutError, match=r"clients=3 \(min_clients=2\), but only 1 SuperNodes"):
        register_clients(Changing(0), 3, {}, 0.1, min_clients=2)


def test_all_are_waited_for_as_long_as_there_is_time(monkeypatch):
    monkeypatch.setattr("strategies.round.registration._POLL_SECONDS", 0.0)
    grid = Changing(0, 2)
    asked = []

    def get_node_ids() -> list[int]:
        asked.append(1)
        if len(asked) == 2:
            grid.join(101, 1)
        return list(grid.handlers)

    grid.get_node_ids = get_node_ids
    assert register_clients(grid, 3, {}, 5.0, min_clients=1).nodes.keys() == {0, 1, 2}


def test_a_node_that_has_just_died_is_waited_for():
    """The SuperLink counts it in for another minute, and answers for it then."""
    grid = Changing(0, 1)

    def gone(message: Message) -> Message:
        del grid.handlers[102]
        grid.join(202, 2)  # its site has restarted it, with another key
        reply = Message(Error(code=5, reason="Node Unavailable"), reply_to=message)
        reply.metadata.__dict__["_src_node_id"] = 1
        return reply

    grid.handlers[102] = gone
    assert register_clients(grid, 3, {}, 5.0).nodes == {0: 100, 1: 101, 2: 202}


@pytest.mark.parametrize("min_clients", [None, 3])
def test_a_silent_node_is_named_as_missing(min_clients):
    grid = Changing(0, 1, 2)
    grid.tamper = lambda reply: reply if reply.metadata.src_node_id != 101 else None
    with pytest.raises(ConfigError, match=r"ids 0\.\.2, but the 2 connected nodes have \[0, 2\]"):
        register_clients(grid, 3, {}, -1.0, min_clients)


def test_all_of_them_when_the_node_configs_say_how_many():
    assert len(register_clients(Changing(0, 1, 2), 0, {}, 1.0)) == 3
    with pytest.raises(TimeoutError, match="clients=3, but only 2 SuperNodes"):
        register_clients(Changing(0, 1), 0, {}, 0.1)
    assert register_clients(Changing(0, 1), 0, {}, 0.1, min_clients=2).nodes.keys() == {0, 1}


# ---- during the run ------------------------------------------------------------------------------


def let_in(grid: Changing, times: int = 2) -> tuple[ClientRegistry, dict[int, int]]:
    """Let those in who are there beside clients 0 and 1; return also how it was before."""
    registry = ClientRegistry(3, {0: 100, 1: 101}, {0: 10, 1: 11})
    before = dict(registry.nodes)
    late_joiners = LateJoiners(registry, grid.mine)
    for _ in range(times):
        late_joiners.admit(grid, list(grid.handlers))
    return registry, before


def test_a_client_that_was_not_there_joins():
    grid = Changing(0, 1, 2)
    registry, _ = let_in(grid)
    assert registry.nodes == {0: 100, 1: 101, 2: 102}
    assert registry.num_examples == {0: 10, 1: 11, 2: 12}
    assert len(grid.asked) == 1


def test_another_node_takes_the_place_of_one_that_is_gone():
    grid = Changing(0)
    grid.join(201, 1)
    assert let_in(grid)[0].nodes == {0: 100, 1: 201}


def raising(message: Message) -> Message:
    return Message(Error(code=2, reason="no such folder"), reply_to=message)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda grid: grid.join(201, 1), "nodes 201 and 101 both say partition-id=1"),
        (lambda grid: grid.join(203, 3), r"says partition-id=3: clients=3 needs .* 0\.\.2"),
        (lambda grid: grid.join(202, 2, code="bb"), "runs another code: 'bb'"),
        (lambda grid: grid.handlers.update({202: raising}), "cannot take part: no such folder"),
    ],
)
def test_who_does_not_fit_stays_out_and_the_run_goes_on(change: Callable, said: str, caplog):
    grid = Changing(0, 1, code="aa")
    change(grid)
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING):
        registry, before = let_in(grid, times=4)
    assert registry.nodes == before
    assert len(grid.asked) == 1, "asked again"
    (record,) = [one for one in caplog.records if "refused to let in" in one.message]
    assert re.search(said, record.message)


# ---- rounds --------------------------------------------------------------------------------------


class Leaving(FedAvg):
    """Client 1's node is not connected in rounds 2 and 3."""

    def _train_round(self, grid: InProcessGrid, *rest: Any) -> ArrayRecord:
        nodes = [1000, 1001, 1002]
        grid.get_node_ids = lambda: nodes if self.state.round in (0, 3) else [1000, 1002]
        return super()._train_round(grid, *rest)


def test_a_client_that_is_gone_is_not_asked_and_is_named():
    sampled = []

    class Sampler(FixedSizeSampler):
        def sample(self, round: int, num_clients: int) -> list[int]:
            sampled.append(num_clients)
            return super().sample(round, num_clients)

    _, reports = run(Leaving(sampler=Sampler()), rounds=4)
    assert [list(r.clients) for r in reports[1:]] == [[0, 1, 2], [0, 2], [0, 2], [0, 1, 2]]
    assert [list(r.absent) for r in reports[1:]] == [[], [1], [1], []]
    assert [list(r.failures) for r in reports[1:]] == [[]] * 4
    assert sampled == [3, 2, 2, 3]


def test_a_round_waits_for_min_replies_clients(monkeypatch):
    monkeypatch.setattr("strategies.round.registration._WAIT_POLL_SECONDS", 0.0)
    looks = []

    class Waiting(FedAvg):
        def _train_round(self, grid: InProcessGrid, *rest: Any) -> ArrayRecord:
            def get_node_ids() -> list[int]:
                looks.append(self.state.round)
                return [1000] if looks.count(1) in range(1, 5) else [1000, 1001, 1002]

            grid.get_node_ids = get_node_ids
            return super()._train_round(grid, *rest)

    _, reports = run(Waiting(min_replies=2), rounds=2)
    assert list(reports[2].clients) == [0, 1, 2]
    assert looks == [0, 1, 1, 1, 1, 1]


def test_they_are_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr("strategies.round.registration._WAIT_POLL_SECONDS", 0.0)
    strategy = Leaving(min_replies=3, connect_timeout_seconds=0.05)
    with pytest.raises(TimeoutError, match=r"min_replies=3, but only 2 of 3 clients are connected"):
        run(strategy, rounds=4)


def test_a_message_names_its_round_and_outlives_it_by_an_hour_for_wrong_clocks():
    strategy = FedAvg()
    run(strategy, rounds=1)
    strategy._timeout_seconds = 77.0
    arrays = to_record({"head.weight": torch.zeros(1, 2)})
    (first, *_) = strategy.configure_train(5, arrays, ConfigRecord(), None)
    assert first.metadata.ttl == 77.0 + 3600.0
    assert first.content.config_records["config"]["timeout-seconds"] == 77.0
    assert first.metadata.group_id == "5"
