"""Which nodes register, join late, leave or are refused, and who takes part in a round."""

import copy
import logging
import re
import time
from collections.abc import Callable

import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.round.availability import ClientAvailability
from fedhet.strategies.round.evaluation import valid_evaluations
from fedhet.strategies.round.registration import (
    FROZEN_MODEL,
    ClientRegistry,
    FederationConfig,
    register_clients,
)
from fedhet.strategies.wire.records import METRICS, UNASKED, config_of, to_metrics
from tests.federation import InProcessGrid, lost, node_info
from tests.refused import refused
from tests.strategies.round.test_round import run
from tests.strategies.sides import built

registration = "fedhet.strategies.round.registration"
availability = "fedhet.strategies.round.availability"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(f"{availability}._WAIT_POLL_SECONDS", 0.05)
    monkeypatch.setattr(f"{registration}._POLL_SECONDS", 0.02)


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
    grid = grid_of(1, size=2)
    join(grid, 108, 0, size=2)
    registry = register(grid, 2)
    assert (registry.nodes, registry.num_examples) == ({0: 108, 1: 101}, {0: 10, 1: 11})
    registry = register(grid_of(0, 2), min_clients=2)
    assert (registry.nodes, len(registry)) == ({0: 100, 2: 102}, 3)


def test_zero_clients_takes_n_from_the_node_configs():
    assert len(register(grid_of(0, 1, 2), size=0)) == 3
    assert register(grid_of(0, 1), size=0, min_clients=2).nodes.keys() == {0, 1}


def silence(grid: InProcessGrid) -> None:
    grid.tamper = lambda reply: reply if reply.metadata.src_node_id != 101 else None


@pytest.mark.parametrize(
    ("change", "how", "named"),
    [
        (
            lambda grid: grid.handlers.pop(102),
            {"size": 0},
            ["clients=3", "clients=2", "runtime.min_clients=2"],
        ),
        (
            lambda grid: [grid.handlers.pop(node) for node in (101, 102)],
            {"min_clients": 2},
            ["clients=3", "runtime.min_clients=2", "1 SuperNodes"],
        ),
        (silence, {"timeout": -1.0}, ["2 SuperNodes"]),
        (lambda grid: grid.handlers.update({101: failing}), {}, ["no such folder"]),
        (
            lambda grid: grid.handlers.pop(102),
            {"nodes_may_join": False},
            ["2 simulated clients", "num-supernodes=3"],
        ),
        (
            lambda grid: grid.handlers.update({101: failing}),
            {"nodes_may_join": False},
            ["2 simulated clients", "no such folder"],
        ),
    ],
)
def test_too_few_clients_end_the_start_with_the_reasons(change, how, named):
    grid = grid_of(0, 1, 2, code="aa")
    change(grid)
    with refused(*named, kind=TimeoutError):
        register(grid, **how)


def card(**changes: object) -> Callable[[Message], Message]:
    """Return a node's answer to the registration as client 2; None takes an entry away."""
    values = {"partition-id": 2, "num-partitions": 3, "num-examples": 12, "code": "aa"}
    values |= {name.replace("_", "-"): value for name, value in changes.items()}
    record = ConfigRecord({name: value for name, value in values.items() if value is not None})
    return lambda message: Message(RecordDict({"client": record}), reply_to=message)


CARDS = [  # what a node answers that is kept out, and why
    (lambda message: Message(RecordDict(), reply_to=message), "partition-id is missing"),
    (failing, "cannot take part: no such folder"),
    (card(partition_id=None), "partition-id is missing"),
    (card(partition_id="2"), "partition-id is '2': it must be a whole number"),
    (card(partition_id=2.0), r"partition-id is 2\.0"),
    (card(partition_id=True), "partition-id is True"),
    (card(partition_id=-1), "partition-id is -1"),
    (card(partition_id=b"2"), "partition-id is b'2'"),
    (card(partition_id=[2]), r"partition-id is \[2\]"),
    (card(partition_id=3), r"has partition-id=3: .* needs .* 0\.\.2"),
    (card(partition_id=10**18), "partition-id is 1000000000000000000"),
    (card(partition_id=1), "nodes 101 and 109 both have partition-id=1"),
    (card(num_partitions=None), "num-partitions is missing"),
    (card(num_partitions=0), "num-partitions is 0"),
    (card(num_partitions=10**12), "num-partitions is 1000000000000"),
    (card(num_examples=None), "num-examples is missing"),
    (card(num_examples=-5), "num-examples is -5"),
    (card(num_examples=1e9), "num-examples is 1000000000.0"),
    (card(num_examples=1 << 60), "num-examples is 1152921504606846976"),
    (card(code="bb"), r"runs another code: 'bb'"),
    (card(code=None), "runs another code: None"),
    (card(code=b"aa"), "runs another code"),
    (card(code="aa\n[92mINFO: all is well"), r"runs another code: 'aa\\\\n"),
]
CODE = {"fingerprint": {"code": "aa"}}


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "message"), CARDS, ids=[message for _, message in CARDS])
def test_a_node_that_does_not_fit_keeps_itself_out_at_the_start_and_later(answer, message, caplog):
    logging.getLogger("flwr").propagate = True
    start, late = (grid_of(0, 1, code="aa") for _ in range(2))
    start.handlers[109] = late.handlers[109] = answer
    with caplog.at_level(logging.WARNING):
        assert register(start, min_clients=2, **CODE).nodes == {0: 100, 1: 101}
        assert admit(late, times=3, code="aa").nodes == {0: 100, 1: 101}
    assert len(late.asked) == 1, "asked again"
    refused = [one.message for one in caplog.records if "refused a node" in one.message]
    assert len(refused) == 2
    for said in refused:
        assert re.search(message, said)
        assert "\n" not in said


def test_a_site_with_other_frozen_weights_keeps_itself_out(caplog):
    logging.getLogger("flwr").propagate = True
    hashes = {"fingerprint": {FROZEN_MODEL: "aa"}}
    grid = grid_of(0, 1, size=2)
    for node, own in ((100, "aa"), (101, "bb")):
        join(grid, node, node - 100, 2, **{FROZEN_MODEL: own})
    with caplog.at_level(logging.WARNING):
        assert register(grid, size=2, min_clients=1, **hashes).nodes == {0: 100}
    assert "(partition 1) runs another frozen-model: 'bb', the server has 'aa'" in caplog.text
    assert "give every site the same pretrained files" in caplog.text


def test_a_site_that_counts_other_clients_keeps_itself_out(caplog):
    """It would take its part of another division: rows held twice, and rows of nobody."""
    grid = grid_of(0, 1, 2)
    join(grid, 102, 2, size=4)
    with caplog.at_level(logging.WARNING):
        assert register(grid, size=0, min_clients=2).nodes == {0: 100, 1: 101}
    assert "node 102 (partition 2) has num-partitions=4, and there are 3 clients" in caplog.text


def test_registration_waits_for_the_successor_of_a_node_that_just_died():
    """The SuperLink lists a dead node for another minute, and answers in its place."""
    grid = grid_of(0, 1)

    def gone(message: Message) -> Message:
        del grid.handlers[102]
        join(grid, 202, 2)  # its site has restarted it, with another key
        return lost(Message(RecordDict(), reply_to=message))

    grid.handlers[102] = gone
    assert register(grid, timeout=5.0).nodes == {0: 100, 1: 101, 2: 202}


def test_a_node_that_hangs_is_waited_for_once():
    grid = grid_of(0, 1, 2)
    silence(grid)
    asked = []

    def send_and_receive(messages, *, timeout):
        asked.extend(message.metadata.dst_node_id for message in messages)
        assert {config_of(message)["timeout-seconds"] for message in messages} == {timeout}
        time.sleep(timeout)
        return InProcessGrid.send_and_receive(grid, messages, timeout=timeout)

    grid.send_and_receive = send_and_receive
    assert register(grid, min_clients=2).nodes == {0: 100, 2: 102}
    assert asked == [100, 101, 102]


def test_a_client_that_outweighs_all_others_is_named(caplog):
    grid = grid_of(0, 1, 2)
    with caplog.at_level(logging.WARNING, "flwr"):
        register(grid)
        assert caplog.text == ""
        content = node_info(2, 3, 22)  # 10 + 11 + 22
        grid.handlers[102] = lambda message: Message(content, reply_to=message)
        register(grid)
    assert "client 2 says that it has 22 of all 43 examples" in caplog.text


def test_a_node_that_was_refused_is_asked_again_when_it_is_back():
    """Its site has mounted the data and restarted it, with the same key."""
    grid, looks = grid_of(0, 1), iter(range(1000))
    grid.handlers[102] = failing
    nodes = grid.get_node_ids

    def get_node_ids() -> list[int]:
        if (look := next(looks)) == 3:
            join(grid, 102, 2)
        return [node for node in nodes() if node != 102 or look != 2]

    grid.get_node_ids = get_node_ids
    assert register(grid, timeout=20.0).nodes == {0: 100, 1: 101, 2: 102}


def test_a_round_waits_for_as_many_clients_as_the_method_needs():
    """One comes back at the third look; without it, a robust aggregator's round is in vain."""
    registry = ClientRegistry(3, {0: 100, 1: 101, 2: 102}, {0: 10, 1: 11, 2: 12})
    grid, looks = grid_of(0, 1), iter(range(1000))
    nodes = grid.get_node_ids

    def get_node_ids() -> list[int]:
        if next(looks) == 2:
            join(grid, 102, 2)
        return nodes()

    grid.get_node_ids = get_node_ids
    config = FederationConfig(connect_timeout_seconds=20.0)
    ClientAvailability(registry, config).refresh(grid, least=3)
    assert 102 in grid.handlers
    del grid.handlers[102]
    config = FederationConfig(connect_timeout_seconds=0.1)
    with pytest.raises(
        TimeoutError, match=r"aggregator or secure aggregation needs 3 clients, but only 2"
    ):
        ClientAvailability(registry, config).refresh(grid, least=3)


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


def twice(grid: InProcessGrid, change: Callable[[Message], Message] = copy.deepcopy) -> None:
    """Let a grid hand on every pulled or sent reply twice, the second one changed, and first."""
    pull = grid.pull_messages

    def pull_messages(ids):
        return [one for reply in pull(ids) for one in (change(copy.deepcopy(reply)), reply)]

    grid.pull_messages = pull_messages
    grid.send_and_receive = lambda messages, *, timeout=None: pull_messages(
        grid.push_messages(list(messages))
    )


def of_node(node: int) -> Callable[[Message], Message]:
    """Return what lets a node answer the messages of others with an error."""

    def forge(reply: Message) -> Message:
        if reply.metadata.src_node_id == node:
            return reply
        forged = lost(reply, Error(code=2, reason="I am not it"))
        forged.metadata.__dict__["_src_node_id"] = node
        return forged

    return forge


@pytest.mark.parametrize("change", [copy.deepcopy, of_node(100), of_node(109)])
def test_a_second_answer_and_one_for_another_node_do_not_register_or_refuse_anybody(change, caplog):
    start, late = grid_of(0, 1, 2), grid_of(0, 1, 2)
    twice(start, change)
    twice(late, change)
    with caplog.at_level(logging.WARNING, "flwr"):
        assert register(start).nodes == {0: 100, 1: 101, 2: 102}
        assert admit(late).nodes == {0: 100, 1: 101, 2: 102}
    assert "refused a node" not in caplog.text
    assert UNASKED in caplog.text


def test_questions_that_the_superlink_did_not_take_are_asked_again():
    grid = grid_of(0, 1, 2)
    push, taken = grid.push_messages, iter([False, True])
    grid.push_messages = lambda messages: push(messages) if next(taken) else []
    assert admit(grid, times=2).nodes == {0: 100, 1: 101, 2: 102}


ALL, WITHOUT_1 = [1000, 1001, 1002], [1000, 1002]
WAIT = range(1, 5)  # the looks after round 1 at which one node alone is connected


def connect(monkeypatch, strategy: FedAvg, nodes: Callable[[list[int]], list[int]]) -> list[int]:
    """Let nodes be connected by the rounds done at every look so far; return these."""
    looks: list[int] = []

    def get_node_ids(grid: InProcessGrid) -> list[int]:
        looks.append(strategy.state.round)
        return nodes(looks)

    monkeypatch.setattr(InProcessGrid, "get_node_ids", get_node_ids)
    monkeypatch.setattr(f"{availability}._WAIT_POLL_SECONDS", 0.0)
    return looks


def test_a_client_that_is_gone_is_not_sampled_and_is_reported_as_absent(monkeypatch):
    strategy = FedAvg()
    connect(monkeypatch, strategy, lambda looks: WITHOUT_1 if looks[-1] in (1, 2) else ALL)
    _, reports = run(strategy, rounds=4)
    found = [(list(r.clients), list(r.absent), list(r.failures)) for r in reports[1:]]
    here, gone = ([0, 1, 2], [], []), ([0, 2], [1], [])
    assert found == [here, gone, gone, here]


def test_a_round_waits_for_min_replies_clients_until_the_timeout(monkeypatch):
    waiting = built(FedAvg, federation=FederationConfig(3, min_replies=2))
    looks = connect(monkeypatch, waiting, lambda looks: ALL[: 1 if looks.count(1) in WAIT else 3])
    _, reports = run(waiting, rounds=2)
    assert list(reports[2].clients) == [0, 1, 2]
    assert looks == [0, 0, 1, 1, 1, 1, 1]
    ending = built(FedAvg, federation=FederationConfig(min_replies=3, connect_timeout_seconds=0.05))
    connect(monkeypatch, ending, lambda looks: WITHOUT_1 if looks[-1] else ALL)
    with refused("min_replies=3", kind=TimeoutError):
        run(ending, rounds=2)


def test_bad_answers_to_an_evaluation_do_not_count():
    """Client 1 names another one, or examples that it cannot have; nobody answers twice."""
    registry = ClientRegistry(2, {0: 100, 1: 101}, {0: 5, 1: 5}, {0: 5, 1: 3})
    waits = RecordDict({"config": ConfigRecord({"timeout-seconds": 9.0})})
    asked = {client: Message(waits, 100 + client, "evaluate") for client in (0, 1, 2)}
    for client, message in asked.items():
        message.metadata.__dict__["_message_id"] = f"to {client}"
    to_another = asked.pop(2)

    def answer(message: Message, client: int, examples: float) -> Message:
        row = {"partition-id": client, "num-examples": examples, "loss": 1.0}
        return Message(RecordDict({METRICS: to_metrics(row)}), reply_to=message)

    def found(*answers: Message) -> tuple[int, list[str]]:
        rows, failures = valid_evaluations(answers, asked, registry)
        return len(rows), failures

    good, fine = answer(asked[0], 0, 5), answer(asked[1], 1, 5)
    assert found(good, fine) == (2, [])
    cases = [(answer(asked[1], *sent), why) for *sent, why in ((0, 5, "partition 0"), (1, 6, "6"))]
    for bad, why in [*cases, (answer(asked[1], 1, 1.5), "1.5")]:
        number, (failure,) = found(good, bad)
        assert number == 1
        assert failure.startswith("client 1, evaluation: ")
        assert why in failure
    number, (again, foreign, silent) = found(good, good, answer(to_another, 1, 5))
    assert number == 1
    assert again.startswith(f"node 100, evaluation: {UNASKED}")
    assert foreign.startswith("node 102, evaluation: ")
    assert silent.startswith("client 1, evaluation: no reply within 9 s")
