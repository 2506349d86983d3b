"""How soon a reply is noticed, by a clock of our own."""

import logging
import time

import httpx
import pytest
from flwr.app import Message, RecordDict

from fedhet.common.flower import grid_polling
from fedhet.server_app import polling_grid
from fedhet.server_app.polling_grid import fast_polling
from tests.federation import InProcessGrid


class SlowGrid(InProcessGrid):
    def __init__(self, seconds: dict[int, float]) -> None:
        super().__init__(dict.fromkeys(seconds, lambda m: Message(RecordDict(), reply_to=m)))
        self.seconds, self.pulls, self.now = seconds, [], 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds

    def pull_messages(self, message_ids):
        nodes = {one: self.asked[one].metadata.dst_node_id for one in message_ids}
        self.pulls.append(set(nodes.values()))
        ready = [one for one in sorted(nodes) if self.now >= self.seconds[nodes[one]]]
        return super().pull_messages(ready)


SlowGrid.__module__ = "flwr.superlink.grid.http_grid"


def ask(monkeypatch, seconds: dict[int, float], timeout: float | None = None):
    slow = SlowGrid(seconds)
    monkeypatch.setattr(polling_grid, "time", slow)
    messages = [Message(RecordDict(), node, "train") for node in seconds]
    with fast_polling(slow):
        replies = slow.send_and_receive(messages, timeout=timeout)
        return [reply.metadata.src_node_id for reply in replies], slow.now, slow.pulls


@pytest.mark.parametrize(("seconds", "said"), [(0.05, 0), (7.3, 0), (3600.0, 6)])
def test_a_reply_is_noticed_soon_and_a_node_that_has_replied_is_not_asked_again(
    monkeypatch, caplog, seconds, said
):
    caplog.set_level(logging.INFO, logger="flwr")
    nodes, now, pulls = ask(monkeypatch, {5: 0.0, 6: seconds})
    assert nodes == [5, 6]
    assert seconds <= now <= min(seconds * 1.05 + 0.25, seconds + 3.0)
    assert pulls[:2] == [{5, 6}, {6}]
    assert caplog.text.count("1 of 2 nodes have not replied: [6]") == said
    assert len(pulls) < 1350  # in an hour 1200 with one every three seconds, as Flower's own


def test_a_reply_is_handed_on_before_the_next_one_arrives(monkeypatch):
    slow = SlowGrid({5: 0.0, 6: 7.3})
    monkeypatch.setattr(polling_grid, "time", slow)
    messages = [Message(RecordDict(), node, "train") for node in slow.seconds]
    with fast_polling(slow):
        replies = iter(slow.send_and_receive(messages))
        assert len(slow.asked) == 2  # both are sent before the first reply is asked for
        assert (next(replies).metadata.src_node_id, slow.now) == (5, 0.0)
        assert next(replies).metadata.src_node_id == 6
    assert slow.now >= 7.3


@pytest.mark.parametrize(("late", "nodes"), [(99.0, [5]), (10.0, [5, 6])])
def test_the_wait_ends_at_the_timeout_and_a_reply_then_counts(monkeypatch, late, nodes):
    found, now, _ = ask(monkeypatch, {5: 1.0, 6: late}, 10.0)
    assert found == nodes
    assert now == pytest.approx(10.0)


@pytest.mark.slow
def test_an_array_that_arrives_after_its_reply_is_noticed_soon(monkeypatch):
    from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects
    from flwr.superlink.grid import http_grid

    monkeypatch.setattr(http_grid, "pull_objects", pull_objects)  # as it is before
    began, looks = time.monotonic(), list[float]()

    def pull(object_id: str) -> bytes:
        looks.append(time.monotonic() - began)
        if looks[-1] < 0.5:
            raise ObjectUnavailableError(object_id)
        return b"an array"

    with fast_polling(SlowGrid({})):
        assert http_grid.pull_objects(["one"], pull) == {"one": b"an array"}
    assert len(looks) == 4  # after 0.1, 0.3 and 0.7 s
    assert looks[-1] < 0.95  # Flower's own looks again after 1 s


def test_a_busy_superlink_is_asked_again_and_a_broken_one_ends_the_run(monkeypatch):
    """As its database is locked, or as another error that stays."""
    from flwr.superlink.grid.http_grid import HttpGrid

    grid, clock = HttpGrid(token="t"), SlowGrid({})
    monkeypatch.setattr(grid_polling, "time", clock)
    invoker = grid._retry_invoker
    invoker.wait_function = clock.sleep
    request = httpx.Request("POST", "https://superlink/v1/runtime/pull-messages")

    def answer(codes: list[int]) -> str:
        if codes and (code := codes.pop(0)) != 200:
            raise httpx.HTTPStatusError("", request=request, response=httpx.Response(code))
        return "an answer"

    with pytest.raises(httpx.HTTPStatusError):
        invoker.invoke(answer, [500])  # Flower's own
    with fast_polling(grid):
        for codes in ([500] * 5, [503, 500, 500]):
            assert invoker.invoke(answer, codes) == "an answer"
            assert not codes
        with pytest.raises(httpx.HTTPStatusError):
            invoker.invoke(answer, [400, 400])
        began = clock.now
        with pytest.raises(httpx.HTTPStatusError):
            invoker.invoke(answer, [500] * 1000)
        assert 300.0 < clock.now - began < 360.0
        assert invoker.invoke(answer, [500]) == "an answer"  # another request


def test_an_object_that_is_not_stored_is_pushed_again_for_a_minute(monkeypatch):
    """A locked database says so at first; a push that has expired, to the end."""
    from flwr.proto.message_pb2 import PushObjectResponse
    from flwr.superlink.grid.http_grid import HttpGrid

    grid, clock = HttpGrid(token="t"), SlowGrid({})
    monkeypatch.setattr(grid_polling, "time", clock)
    refusals, pushed = [3, 1000], []

    def push(request: str) -> PushObjectResponse:
        pushed.append(request)
        refusals[0] -= 1
        return PushObjectResponse(stored=refusals[0] < 0)

    monkeypatch.setattr(grid._runtime_client, "PushObject", push)
    with fast_polling(grid):
        assert grid._runtime_client.PushObject("an object").stored
        assert pushed == ["an object"] * 4
        refusals.pop(0)
        began = clock.now
        assert not grid._runtime_client.PushObject("another").stored
        assert 60.0 <= clock.now - began < 62.0


def test_only_flowers_own_grids_are_changed():
    ours = InProcessGrid({})
    simulated = type("InMemoryGrid", (InProcessGrid,), {"pull_interval": 0.1})({})
    with fast_polling(ours), fast_polling(simulated):
        assert "send_and_receive" not in vars(ours)
        assert simulated.pull_interval == 0.02
