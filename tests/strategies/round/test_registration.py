"""Which nodes register, join late, leave or are refused, and who takes part in a round."""

import logging
import re
from collections.abc import Callable

import pytest
from flwr.app import Error, Message, RecordDict

from common.errors import ConfigError
from strategies.fedavg import FedAvg
from strategies.round.registration import (
    ClientAvailability,
    ClientRegistry,
    FederationConfig,
    register_clients,
)
from tests.federation import InProcessGrid, lost, node_info
from tests.strategies.round.test_round import run

registration = "strategies.round.registration"


def grid_of(*clients: int, size: int = 3, **hashes: str) -> InProcessGrid:
    grid = InProcessGrid({})
    for client in clients:
        join(grid, 100 + client, client, size, **hashes)
    return grid


def join(grid: InProcessGrid, node: int, client: int, size: int = 3, **hashes: str) -> None:
    content = node_info(client, size, 10 + client, **hashes)
    grid.handlers[node] = lambda message: Message(content, reply_to=message)


def register(grid: InProcessGrid, size: int = 3, timeout: float = 0.1, **how) -> ClientRegistry:
    config = FederationConfig(num_clients=size, connect_timeout_seconds=timeout, **how)
    return register_clients(grid, config)


def failing(message: Message) -> Message:
    return Message(Error(code=2, reason="no such folder"), reply_to=message)


def test_registration_maps_clients_to_nodes_and_min_clients_are_enough_after_the_timeout():
    grid = grid_of(1)
    join(grid, 108, 0)
    registry = register(grid, 2)
    assert (registry.nodes, registry.num_examples) == ({0: 108, 1: 101}, {0: 10, 1: 11})
    registry = register(grid_of(0, 2), min_clients=2)
    assert (registry.nodes, len(registry)) == ({0: 100, 2: 102}, 3)


def test_zero_clients_takes_n_from_the_node_configs():
    assert len(register(grid_of(0, 1, 2), size=0)) == 3
    assert register(grid_of(0, 1), size=0, min_clients=2).nodes.keys() == {0, 1}


AA = {"fingerprint": {"code": "aa"}}


def silence(grid: InProcessGrid) -> None:
    grid.tamper = lambda reply: reply if reply.metadata.src_node_id != 101 else None


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        (lambda grid: join(grid, 102, 1), {}, "nodes 101 and 102 both have partition-id=1"),
        (lambda grid: join(grid, 103, 3), {}, r"clients=3 needs the partition ids 0\.\.2"),
        (lambda grid: join(grid, 102, 2, code="bb"), AA, r"partition 2\) runs another code: 'bb'"),
        (lambda grid: grid.handlers.update({101: failing}), {}, "node 101 cannot .*: no such"),
        (lambda grid: grid.handlers.pop(102), {"size": 0}, "clients=3, but only 2 SuperNodes"),
        (
            lambda grid: [grid.handlers.pop(node) for node in (101, 102)],
            {"min_clients": 2},
            r"clients=3 \(min_clients=2\), but only 1 SuperNodes",
        ),
        (silence, {"timeout": -1.0}, r"0\.\.2, but the 2 connected nodes have \[0, 2\]"),
    ],
)
def test_a_federation_that_does_not_fit_is_refused(change, how, message):
    grid = grid_of(0, 1, 2, code="aa")
    change(grid)
    with pytest.raises((ConfigError, TimeoutError), match=message):
        register(grid, **how)


def test_registration_waits_for_all_clients_until_the_timeout(monkeypatch):
    monkeypatch.setattr(f"{registration}._POLL_SECONDS", 0.0)
    grid = grid_of(0, 2)

    def get_node_ids() -> list[int]:
        nodes = list(grid.handlers)
        join(grid, 101, 1)
        return nodes

    grid.get_node_ids = get_node_ids
    assert register(grid, timeout=5.0, min_clients=1).nodes.keys() == {0, 1, 2}


def test_registration_waits_for_the_successor_of_a_node_that_just_died():
    """The SuperLink lists a dead node for another minute, and answers in its place."""
    grid = grid_of(0, 1)

    def gone(message: Message) -> Message:
        del grid.handlers[102]
        join(grid, 202, 2)  # its site has restarted it, with another key
        return lost(Message(RecordDict(), reply_to=message))

    grid.handlers[102] = gone
    assert register(grid, timeout=5.0).nodes == {0: 100, 1: 101, 2: 202}


def admit(grid: InProcessGrid, times: int = 2, **hashes: str) -> ClientRegistry:
    registry = ClientRegistry(3, {0: 100, 1: 101}, {0: 10, 1: 11})
    availability = ClientAvailability(registry, FederationConfig(fingerprint=hashes))
    for _ in range(times):
        availability.refresh(grid)
    return registry


def test_a_missing_client_joins_and_is_asked_once_and_a_new_node_replaces_one_that_is_gone():
    grid = grid_of(0, 1, 2)
    registry = admit(grid)
    assert registry.nodes == {0: 100, 1: 101, 2: 102}
    assert registry.num_examples == {0: 10, 1: 11, 2: 12}
    assert len(grid.asked) == 1
    grid = grid_of(0)
    join(grid, 201, 1)
    assert admit(grid).nodes == {0: 100, 1: 201}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda grid: join(grid, 201, 1, code="aa"), "nodes 201 and 101 both have partition-id=1"),
        (lambda grid: join(grid, 203, 3, code="aa"), r"has partition-id=3: .* needs .* 0\.\.2"),
        (lambda grid: join(grid, 202, 2, code="bb"), "runs another code: 'bb'"),
        (lambda grid: grid.handlers.update({202: failing}), "cannot take part: no such folder"),
    ],
)
def test_a_late_node_that_does_not_fit_is_refused_once(change: Callable, message: str, caplog):
    grid = grid_of(0, 1, code="aa")
    change(grid)
    logging.getLogger("flwr").propagate = True
    with caplog.at_level(logging.WARNING):
        registry = admit(grid, times=4, code="aa")
    assert registry.nodes == {0: 100, 1: 101}
    assert len(grid.asked) == 1, "asked again"
    (record,) = [one for one in caplog.records if "refused a node" in one.message]
    assert re.search(message, record.message)


ALL, WITHOUT_1 = [1000, 1001, 1002], [1000, 1002]
WAIT = range(1, 5)  # the looks after round 1 at which one node alone is connected


def connect(monkeypatch, strategy: FedAvg, nodes: Callable[[list[int]], list[int]]) -> list[int]:
    """Let nodes be connected by the rounds done at every look so far; return these."""
    looks: list[int] = []

    def get_node_ids(grid: InProcessGrid) -> list[int]:
        looks.append(strategy.state.round)
        return nodes(looks)

    monkeypatch.setattr(InProcessGrid, "get_node_ids", get_node_ids)
    monkeypatch.setattr(f"{registration}._WAIT_POLL_SECONDS", 0.0)
    return looks


def test_a_client_that_is_gone_is_not_sampled_and_is_reported_as_absent(monkeypatch):
    strategy = FedAvg()
    connect(monkeypatch, strategy, lambda looks: WITHOUT_1 if looks[-1] in (1, 2) else ALL)
    _, reports = run(strategy, rounds=4)
    found = [(list(r.clients), list(r.absent), list(r.failures)) for r in reports[1:]]
    here, gone = ([0, 1, 2], [], []), ([0, 2], [1], [])
    assert found == [here, gone, gone, here]


def test_a_round_waits_for_min_replies_clients_until_the_timeout(monkeypatch):
    waiting = FedAvg(federation=FederationConfig(3, min_replies=2))
    looks = connect(monkeypatch, waiting, lambda looks: ALL[: 1 if looks.count(1) in WAIT else 3])
    _, reports = run(waiting, rounds=2)
    assert list(reports[2].clients) == [0, 1, 2]
    assert looks == [0, 0, 1, 1, 1, 1, 1]
    ending = FedAvg(federation=FederationConfig(min_replies=3, connect_timeout_seconds=0.05))
    connect(monkeypatch, ending, lambda looks: WITHOUT_1 if looks[-1] else ALL)
    with pytest.raises(TimeoutError, match=r"min_replies=3, but only 2 of 3 clients are connected"):
        run(ending, rounds=2)
