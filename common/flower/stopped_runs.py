"""Issue: a site is silent after a run that was stopped while a message was on its way to it.

The SuperNode ignores such a message, but leaves it and its task to the ClientApp. Replies are sent
only after a message has come, as many as it takes for one to be there. So this reply is sent in
place of the one to the next run's first message, that one waits for another message, and so on
until the SuperNode is started again. With this the SuperNode drops the message and its task, as it
does after any other error.
Mends: `flwr.supernode.start_client_internal._pull_and_store_message`.
Releases: 1.39 to 1.42. Not needed when the first assertion of
`tests/test_flower_inside.py::test_a_supernode_drops_the_message_of_a_run_that_was_stopped` fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_REQUESTS = ("pull_object", "confirm_message_received")


class StoppedRunError(RuntimeError):
    """The run was stopped; Flower's own is a BaseException, which its cleaning up lets through."""


def install() -> None:
    """Let this process's SuperNode clean up after a message of a run that was stopped."""
    from flwr.supernode import start_client_internal

    pull = start_client_internal._pull_and_store_message

    def pull_and_clean_up(**given: Any) -> int | None:
        return pull(**given | {name: _with_error(given[name]) for name in _REQUESTS})

    vars(start_client_internal)["_pull_and_store_message"] = pull_and_clean_up


def _with_error(request: Callable[..., Any]) -> Callable[..., Any]:
    from flwr.supercore.run import RunNotRunningException

    def checked(*words: Any) -> Any:
        try:
            return request(*words)
        except RunNotRunningException as stopped:
            raise StoppedRunError("the run is not running any more") from stopped

    return checked
