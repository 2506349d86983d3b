"""Replies of a real HttpGrid, whose SuperLink is in this process and has not got all arrays yet."""

import threading
import time
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse, PushAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from fedhet.server_app.polling_grid import fast_polling
from fedhet.strategies.wire.packed_records import PACKED, packed, unpacked
from fedhet.strategies.wire.records import give_up, to_record


class SuperLink:
    """The client of a SuperLink that announces the reply of every node; some are still uploaded."""

    def __init__(self, uploading: set[int]) -> None:
        replies = {f"to {node}": reply_of(node) for node in range(4)}
        self.announced = {
            one: (message_to_proto(remove_content_from_message(reply)), get_object_tree(reply))
            for one, reply in replies.items()
        }
        self.objects: dict[str, bytes] = {}
        self.missing: set[str] = set()
        for node, reply in enumerate(replies.values()):
            found = {name: one.deflate() for name, one in get_all_nested_objects(reply).items()}
            self.objects |= found
            self.missing |= found.keys() if node in uploading else set()
        self.confirmed: list[str] = []
        self.looks = 0

    def PullMessages(self, request):
        asked = getattr(request, "message_ids", None)  # its name before 1.43
        asked = request.reply_to_message_ids.vals if asked is None else asked
        found = [self.announced.pop(one) for one in asked if one in self.announced]
        messages, trees = zip(*found, strict=True) if found else ((), ())
        return PullAppMessagesResponse(messages_list=messages, message_object_trees=trees)

    def PullObject(self, request):
        self.looks += 1
        content = self.objects[request.object_id]
        there = request.object_id not in self.missing
        return PullObjectResponse(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)


def reply_of(node: int) -> Message:
    about = Metadata(1, "", node, 1, f"to {node}", "", 1.0, 9.0, "train")
    content = RecordDict({"config": ConfigRecord({"node": node})})
    message = make_message(about, content)
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.fixture
def connected():
    def make(*uploading: int) -> tuple[HttpGrid, SuperLink]:
        grid, superlink = HttpGrid(token="t"), SuperLink(set(uploading))
        grid.set_run(Run.create_empty(1))
        grid._client = superlink
        return grid, superlink

    return make


def pulled_messages(grid: HttpGrid, nodes: set[int], number: int) -> list[Message]:
    """Return the replies of nodes, once there are that many: on a busy machine at a second look."""
    found, began = list(grid.pull_messages({f"to {node}" for node in nodes})), time.monotonic()
    while len(found) < number and time.monotonic() - began < 20.0:
        seen = {int(one.metadata.reply_to_message_id.removeprefix("to ")) for one in found}
        found += grid.pull_messages({f"to {node}" for node in nodes - seen})
    return found


def pulled(grid: HttpGrid, nodes: set[int], number: int) -> dict[int, object]:
    """Return what nodes have replied, by node; errors have no content."""
    found = pulled_messages(grid, nodes, number)
    return {
        int(reply.metadata.reply_to_message_id.removeprefix("to ")): (
            None if reply.has_error() else reply.content["config"]["node"]
        )
        for reply in found
    }


@pytest.mark.slow
def test_flowers_own_grid_waits_for_the_slowest(connected):
    grid, superlink = connected(2)
    asked = threading.Thread(target=grid.pull_messages, args=({"to 1", "to 2", "to 3"},))
    asked.start()
    asked.join(1.0)
    assert asked.is_alive()
    superlink.missing.clear()
    asked.join(20.0)
    assert not asked.is_alive()


@pytest.mark.slow
def test_a_reply_whose_arrays_are_on_their_way_keeps_no_other(connected):
    grid, superlink = connected(2)
    began = time.monotonic()
    with fast_polling(grid):
        assert pulled(grid, {0, 1, 2, 3}, 3) == {0: 0, 1: 1, 3: 3}
        assert pulled(grid, {2}, 0) == {}
        assert time.monotonic() - began < 5.0  # Flower's own grid waits until they are there
        assert len(superlink.confirmed) == 3
        superlink.missing.clear()
        assert pulled(grid, {2}, 1) == {2: 2}
        assert len(superlink.confirmed) == 4
        assert pulled(grid, {2}, 0) == {}  # once


@pytest.mark.slow
def test_a_question_about_others_leaves_a_reply_on_its_way(connected):
    """As asynchronous rounds do, which look for late joiners between two looks for replies."""
    grid, superlink = connected(2)
    with fast_polling(grid):
        assert pulled(grid, {0, 2}, 1) == {0: 0}
        assert pulled(grid, {3}, 1) == {3: 3}
        superlink.missing.clear()
        assert pulled(grid, {1}, 1) == {1: 1}  # not what nobody asked for
        assert pulled(grid, {2}, 1) == {2: 2}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["given up", "the run has ended"])
def test_a_reply_that_nobody_waits_for_is_given_up(how, connected):
    grid, superlink = connected(2)
    before = set(threading.enumerate())
    with suppress(KeyError), fast_polling(grid):
        assert pulled(grid, {0, 2}, 1) == {0: 0}
        assert pulled(grid, {2, 3}, 1) == {3: 3}
        if how == "the run has ended":
            raise KeyError
        give_up(grid, ["to 2"])
    for thread in set(threading.enumerate()) - before:
        thread.join(5.0)
    looks = superlink.looks
    time.sleep(0.2)
    assert superlink.looks == looks  # the process can end
    assert len(superlink.confirmed) == 2


@pytest.mark.parametrize("kind", [b"ConfigRecord", b"RecordDict", b"Message"])
def test_what_is_no_message_is_an_error_of_its_node_alone(kind, connected):
    """The SuperLink has checked the head of each object, and no more."""
    grid, superlink = connected()
    message = reply_of(1)
    broken = {
        name: (head := one.deflate().partition(b"\0"))[0] + head[1] + b"\xff\xff"
        for name, one in get_all_nested_objects(message).items()
        if one.deflate().startswith(kind)
    }
    assert len(broken) == 1
    superlink.objects |= broken
    with fast_polling(grid):
        found = pulled_messages(grid, {0, 1, 2, 3}, 4)
    (error,) = [one for one in found if one.has_error()]
    assert error.metadata.src_node_id == 1
    assert error.error.reason.startswith("its reply is no message: ")
    assert sorted(one.content["config"]["node"] for one in found if one.has_content()) == [0, 2, 3]


def test_a_packed_reply_is_plain_again_and_a_damaged_one_is_an_error_of_its_node(connected):
    grid, superlink = connected()
    record = to_record({"a": torch.arange(3.0), "b": torch.ones(2)})
    for node in (1, 2):
        message = make_message(reply_of(node).metadata, packed([RecordDict({"x": record})])[0])
        if node == 2:
            array = message.content["x"][PACKED]
            message.content["x"][PACKED] = replace(array, data=array.data[:-1])
        message.metadata.__dict__["_message_id"] = message.object_id
        found = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
        superlink.objects |= found
        about = message_to_proto(remove_content_from_message(message))
        superlink.announced[f"to {node}"] = (about, get_object_tree(message))
    with fast_polling(grid):
        first, second = sorted(
            pulled_messages(grid, {1, 2}, 2), key=lambda one: one.metadata.src_node_id
        )
    assert [*first.content["x"]] == ["a", "b"]
    assert first.content["x"]["a"].data == record["a"].data
    assert second.metadata.src_node_id == 2
    assert "a packed record has" in second.error.reason


def test_what_is_sent_is_packed_and_the_messages_have_their_ids(connected):
    grid, superlink = connected()
    record = to_record({str(i): torch.full((2,), float(i)) for i in range(50)})
    messages = [Message(RecordDict({"x": record}), node, "train") for node in (1, 2)]
    requests, pushed = [], {}

    def push(request):
        requests.append(request)
        trees = request.message_object_trees
        ids = {one.object_id for tree in trees for one in iterate_object_tree(tree)}
        named = [one.metadata.message_id for one in request.messages_list]
        return PushAppMessagesResponse(message_ids=named, objects_to_push=ids, session_id="s")

    def push_object(request):
        pushed[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    superlink.PushMessages, superlink.PushObject = push, push_object
    with fast_polling(grid):
        ids = list(grid.push_messages(messages))
    assert ids == [message.metadata.message_id for message in messages]
    assert len(set(ids)) == 2
    assert len(pushed) < 10
    assert all(message.content["x"] is record for message in messages)
    (request,) = requests
    for one, tree in zip(request.messages_list, request.message_object_trees, strict=True):
        needed = {each.object_id: pushed[each.object_id] for each in iterate_object_tree(tree)}
        sent = inflate_object_from_contents(one.metadata.message_id, needed)
        assert unpacked(sent.content)["x"]["49"].data == record["49"].data


def test_who_answered_which_message_is_what_the_superlink_knows(connected):
    grid, superlink = connected()
    forged = reply_of(1)
    forged.metadata.__dict__.update(_src_node_id=3, _reply_to_message_id="to 3")
    superlink.objects[reply_of(1).object_id] = forged.deflate()
    with fast_polling(grid):
        (found,) = pulled_messages(grid, {1}, 1)
    assert (found.metadata.src_node_id, found.metadata.reply_to_message_id) == (1, "to 1")
    assert found.content["config"]["node"] == 1


def test_an_upload_that_the_superlink_has_given_up_is_an_error(connected):
    grid, superlink = connected()
    gone = superlink.PullObject

    def pull(request):
        found = gone(request)
        return PullObjectResponse() if b"never" in found.object_content else found

    superlink.PullObject = pull
    superlink.objects = dict.fromkeys(superlink.objects, b"never")
    with fast_polling(grid):
        assert pulled(grid, {1}, 1) == {1: None}
