"""How soon a reply is noticed: a clock of our own."""

from __future__ import annotations

import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from server_app import polling_grid as module
from server_app.polling_grid import FastPollingGrid, with_fast_polling
from tests.federation import InProcessGrid


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


class SlowGrid(InProcessGrid):
    """Replies are there after so many seconds, by node."""

    def __init__(self, clock: Clock, seconds: dict[int, float]) -> None:
        super().__init__({})
        self.clock, self.seconds = clock, seconds
        self.pushed: dict[str, Message] = {}
        self.asked: list[set[str]] = []

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(len(self.pushed))
            self.pushed[message.metadata.message_id] = message
        return list(self.pushed)

    def pull_messages(self, message_ids):
        self.asked.append(set(message_ids))
        ready = [
            self.pushed[one]
            for one in sorted(message_ids)
            if self.clock.now >= self.seconds[self.pushed[one].metadata.dst_node_id]
        ]
        return [Message(RecordDict(), reply_to=message) for message in ready]


def ask(monkeypatch, seconds: dict[int, float], timeout: float | None):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    slow = SlowGrid(clock, seconds)
    content = RecordDict({"config": ConfigRecord()})
    messages = [Message(content, node, "train") for node in seconds]
    replies = list(FastPollingGrid(slow).send_and_receive(messages, timeout=timeout))
    return [reply.metadata.src_node_id for reply in replies], clock.now, slow


def test_a_reply_is_noticed_within_a_twentieth_of_the_wait(monkeypatch):
    for seconds in (0.05, 1.0, 7.3, 50.0):
        nodes, now, _ = ask(monkeypatch, {5: seconds}, None)
        assert nodes == [5]
        assert seconds <= now <= seconds * 1.05 + 0.1


def test_a_long_wait_costs_no_more_questions_than_flowers_own(monkeypatch):
    _, now, slow = ask(monkeypatch, {5: 3600.0}, None)
    assert now < 3603
    assert len(slow.asked) < 1350  # of 1200 with one every three seconds


def test_who_has_answered_is_not_asked_again(monkeypatch):
    nodes, _, slow = ask(monkeypatch, {5: 0.0, 6: 1.0}, None)
    assert nodes == [5, 6]
    assert slow.asked[0] == {"0", "1"}
    assert slow.asked[1] == {"1"}


def test_the_timeout_is_kept_to(monkeypatch):
    nodes, now, _ = ask(monkeypatch, {5: 1.0, 6: 99.0}, 10.0)
    assert nodes == [5]
    assert now == pytest.approx(10.0)


def test_a_reply_at_the_timeout_counts(monkeypatch):
    nodes, _, _ = ask(monkeypatch, {5: 10.0}, 10.0)
    assert nodes == [5]


def test_only_flowers_own_grids_are_changed():
    ours = InProcessGrid({})
    assert with_fast_polling(ours) is ours
    flowers = type("HttpGrid", (InProcessGrid,), {"__module__": "flwr.superlink.grid.http_grid"})
    assert isinstance(with_fast_polling(flowers({})), FastPollingGrid)
    simulated = type("InMemoryGrid", (InProcessGrid,), {"pull_interval": 0.1})({})
    assert with_fast_polling(simulated) is simulated
    assert simulated.pull_interval == 0.02
