"""Issue: a reply whose arrays are on their way keeps the other replies waiting.

A reply is announced before its arrays are there. Flower's grid waits for them where it asks for
replies, one after the other. So a site with a slow line, or one that vanished while it sent, would
keep the others' replies waiting for as long as the SuperLink allows (three minutes). Here every
announced reply is pulled in a thread of its own.

Also decodes replies. A malformed reply excludes only its sender. Who sent it, and to which message,
is what the SuperLink has checked, not what the reply says of itself (node_identity.py).

Uses: `HttpGrid.pull_messages` with a client that answers some requests itself (`_runtime_client`,
`_client`), `ObjectPullError`, `metadata_from_proto`.
Releases: 1.39 to 1.42. Not needed when Flower's own grid hands over what is whole:
`tests/server_app/test_arriving_replies.py::test_flowers_own_grid_waits_for_the_slowest`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.common.serde_utils import metadata_from_proto
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

from fedhet.common.flower.messages import ErrorCode, make_message

_SECONDS = 0.1  # for what is there already
_LONGEST_SECONDS = 1.0  # for the first of what is on its way; the caller looks again
_AT_ONCE = threading.BoundedSemaphore(32)  # each holds a reply in memory


class ArrivingReplies:
    """Asks a grid for replies, and pulls them.

    Args:
        grid: Flower's HttpGrid. Copies of it, with a client that answers as this needs, do the
            work, with Flower's own code.
        decode: turns a reply's content into plain records; whatever it raises excludes the sender.
    """

    def __init__(self, grid: Any, decode: Callable[[RecordDict], RecordDict]) -> None:
        self._grid, self._decode = grid, decode
        self._pulls: dict[str, _Pull] = {}  # by the id of the message that is answered

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the whole replies to these messages; wait a second at most for those on their way.

        Others stay on their way: a round and the late joiners beside it ask by turns.
        """
        asked = set(message_ids)
        if new := asked - self._pulls.keys():
            client = _Announcing(self._grid._runtime_client)
            _messages(self._grid, client, new)
            for one in client.announcements():
                answered = one.messages_list[0].metadata.reply_to_message_id
                self._pulls[answered] = _Pull(self._grid, one, self._decode)
        pulls = {one: pull for one, pull in self._pulls.items() if one in asked}
        whole, arriving = wait([pull.reply for pull in pulls.values()], timeout=_SECONDS)
        if arriving and not whole:
            wait(arriving, timeout=_LONGEST_SECONDS, return_when=FIRST_COMPLETED)
        done = [answers for answers, pull in pulls.items() if pull.reply.done()]
        return [message for one in done for message in self._pulls.pop(one).reply.result()]

    def give_up(self, message_ids: Iterable[str]) -> None:
        """Pull no more of the replies to these messages, and forget what is there of them."""
        for one in self._pulls.keys() & set(message_ids):
            self._pulls.pop(one).client.given_up = True

    def close(self) -> None:
        """Give up what is on its way."""
        self.give_up(self._pulls)


class _Pull:
    """One reply on its way, in a thread that nobody waits for."""

    def __init__(
        self, grid: Any, announcement: Any, decode: Callable[[RecordDict], RecordDict]
    ) -> None:
        self._decode = decode
        self._about = metadata_from_proto(announcement.messages_list[0].metadata)
        self.client = _OneReply(grid._runtime_client, announcement)
        self.reply: Future[list[Message]] = Future()
        threading.Thread(target=self._run, args=(grid,), daemon=True).start()

    def _run(self, grid: Any) -> None:
        try:
            with _AT_ONCE:
                self.reply.set_result(self._read(grid))
        except BaseException as error:
            self.reply.set_exception(error)

    def _read(self, grid: Any) -> list[Message]:
        """Return the reply; in the place of one that cannot be read, an error of it.

        Raises:
            Exception: of the connection.
        """
        reason = "its reply has not come whole"  # from 1.43 on Flower's code returns nothing then
        try:
            if found := [self._known(message) for message in _messages(grid, self.client, ())]:
                return found
        except Exception as error:
            if not self.client.whole:
                raise
            reason = f"its reply is no message: {type(error).__name__}: {error}"
        return [make_message(self._about, error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))]

    def _known(self, message: Message) -> Message:
        """Return a reply as one of the node, and to the message, that the SuperLink knows."""
        if message.has_error():
            return make_message(self._about, error=message.error)
        if not isinstance(message.content, RecordDict):
            raise TypeError(f"its content is a {type(message.content).__name__}")
        return make_message(self._about, content=self._decode(message.content))


class _Client:
    """A grid's client, with answers of its own to some requests."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _Announcing(_Client):
    """Keeps what the SuperLink announces, and says that it is nothing."""

    announcement: Any = None

    def PullMessages(self, request: Any) -> Any:
        self.announcement = self._client.PullMessages(request)
        return type(self.announcement)()

    def announcements(self) -> list[Any]:
        """Return one of each reply; none if the SuperLink could not be asked."""
        found = self.announcement
        if found is None:
            return []
        pairs = zip(found.messages_list, found.message_object_trees, strict=True)
        return [
            type(found)(messages_list=[message], message_object_trees=[tree])
            for message, tree in pairs
        ]


class _OneReply(_Client):
    """Announces one reply, and pulls its arrays until it is given up."""

    given_up = False
    whole = False  # all of it is here: what fails now is the reply

    def __init__(self, client: Any, announcement: Any) -> None:
        super().__init__(client)
        self._announcement = announcement

    def PullMessages(self, request: Any) -> Any:
        return self._announcement

    def PullObject(self, request: Any) -> Any:
        if self.given_up:
            raise ObjectPullError(request.object_id, "it is not waited for any more")
        return self._client.PullObject(request)

    def ConfirmMessageReceived(self, request: Any) -> Any:
        answer = self._client.ConfirmMessageReceived(request)
        self.whole = True
        return answer


def _messages(grid: Any, client: _Client, message_ids: Iterable[str]) -> list[Message]:
    """Return what Flower's own code pulls through another client."""
    one = copy.copy(grid)
    one._client = client
    return list(type(grid).pull_messages(one, message_ids))
