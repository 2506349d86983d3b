"""Which nodes register, join late, leave or are refused, and who takes part in a round."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
from flwr.app import Error, Message, RecordDict

from common.errors import ConfigError
from strategies.components.samplers import FixedSizeSampler
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
    """Return a grid of nodes 100, 101, ..., by partition id."""
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


# ---- before round 1 ------------------------------------------------------------------------------


def test_registration_maps_clients_to_nodes_and_min_clients_are_enough_after_the_timeout():
    grid = InProcessGrid({})
    join(grid, 7, 1)
    join(grid, 8, 0)
    registry = register(grid, 2)
    assert (registry.nodes, registry.num_examples) == ({0: 8, 1: 7}, {0: 10, 1: 11})
    registry = register(grid_of(0, 2), min_clients=2)
    assert (registry.nodes, len(registry)) == ({0: 100, 2: 102}, 3)


def test_zero_clients_takes_n_from_the_node_configs():
    assert len(register(grid_of(0, 1, 2), size=0)) == 3
    with pytest.raises(TimeoutError, match="clients=3, but only 2 SuperNodes"):
        register(grid_of(0, 1), size=0)
    assert register(grid_of(0, 1), size=0, min_clients=2).nodes.keys() == {0, 1}


def same_code(grid: InProcessGrid) -> None:
    join(grid, 101, 1, code="aa")
    join(grid, 102, 2, code="bb")


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        (lambda grid: join(grid, 102, 1), {}, "nodes 101 and 102 both have partition-id=1"),
        (lambda grid: join(grid, 103, 3), {}, r"clients=3 needs the partition ids 0\.\.2"),
        (same_code, {}, r"node 102 \(partition 2\) runs another code: 'bb'"),
        (lambda grid: grid.handlers.update({101: failing}), {}, "node 101 cannot .*: no such"),
        (lambda grid: grid.handlers.pop(102), {}, "clients=3, but only 2 SuperNodes"),
        (
            lambda grid: [grid.handlers.pop(node) for node in (101, 102)],
            {"min_clients": 2},
            r"clients=3 \(min_clients=2\), but only 1 SuperNodes",
        ),
    ],
)
def test_a_federation_that_does_not_fit_is_refused(change, how, message):
    grid = grid_of(0, 1, 2, code="aa")
    change(grid)
    hashes = {"code": "aa"} if change is same_code else {}
    with pytest.raises((ConfigError, TimeoutError), match=message):
        register(grid, fingerprint=hashes, **how)


def test_a_silent_node_is_reported_as_missing():
    grid = grid_of(0, 1, 2)
    grid.tamper = lambda reply: reply if reply.metadata.src_node_id != 101 else None
    with pytest.raises(ConfigError, match=r"ids 0\.\.2, but the 2 connected nodes have \[0, 2\]"):
        register(grid, timeout=-1.0)


def test_registration_waits_for_all_clients_until_the_timeout(monkeypatch):
    monkeypatch.setattr(f"{registration}._POLL_SECONDS", 0.0)
    grid, calls = grid_of(0, 2), []

    def get_node_ids() -> list[int]:
        calls.append(1)
        if len(calls) == 2:
            join(grid, 101, 1)
        return list(grid.handlers)

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


# ---- during the run ------------------------------------------------------------------------------


def admit(grid: InProcessGrid, times: int = 2, **hashes: str) -> ClientRegistry:
    """Admit the grid's nodes to a run of clients 0 and 1."""
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


# ---- rounds --------------------------------------------------------------------------------------


class Leaving(FedAvg):
    """Client 1's node is not connected in rounds 2 and 3."""

    def start(self, grid, *args, **how):
        nodes = [1000, 1001, 1002]
        grid.get_node_ids = lambda: nodes if self.state.round in (0, 3) else [1000, 1002]
        return super().start(grid, *args, **how)


def test_a_client_that_is_gone_is_not_sampled_and_is_reported_as_absent():
    sampled = []

    class Sampler(FixedSizeSampler):
        def sample(self, round: int, num_clients: int) -> list[int]:
            sampled.append(num_clients)
            return super().sample(round, num_clients)

    _, reports = run(Leaving(sampler=Sampler()), rounds=4)
    assert [(list(r.clients), list(r.absent), list(r.failures)) for r in reports[1:]] == [
        (([0, 2], [1], []) if r in (2, 3) else ([0, 1, 2], [], [])) for r in (1, 2, 3, 4)
    ]
    assert sampled == [3, 2, 2, 3]


def test_a_round_waits_for_min_replies_clients(monkeypatch):
    monkeypatch.setattr(f"{registration}._WAIT_POLL_SECONDS", 0.0)
    looks = []

    class Waiting(FedAvg):
        def start(self, grid, *args, **how):
            def get_node_ids() -> list[int]:
                looks.append(self.state.round)
                return [1000] if looks.count(1) in range(1, 5) else [1000, 1001, 1002]

            grid.get_node_ids = get_node_ids
            return super().start(grid, *args, **how)

    _, reports = run(Waiting(federation=FederationConfig(3, min_replies=2)), rounds=2)
    assert list(reports[2].clients) == [0, 1, 2]
    assert looks == [0, 0, 1, 1, 1, 1, 1]


def test_the_wait_for_min_replies_clients_ends_at_the_timeout(monkeypatch):
    monkeypatch.setattr(f"{registration}._WAIT_POLL_SECONDS", 0.0)
    federation = FederationConfig(min_replies=3, connect_timeout_seconds=0.05)
    with pytest.raises(TimeoutError, match=r"min_replies=3, but only 2 of 3 clients are connected"):
        run(Leaving(federation=federation), rounds=4)
