"""Issue: a site is silent after a run that was stopped while a message was on its way to it.

The SuperNode ignores such a message, but keeps it and its task, and the ClientApp answers it. The
SuperNode sends replies only after it has received a message, and then waits for one reply. So it
sends this answer in the turn of the next run's first message, whose own reply waits until another
message comes, and so on until the SuperNode is started again. With this the SuperNode drops the
message and its task, as it does after any other error.
Mends: `flwr.supernode.start_client_internal._pull_and_store_message`.
Releases: 1.39 to 1.42. Not needed when the first assertion of
`tests/test_flower_inside.py::test_a_supernode_drops_the_message_of_a_run_that_was_stopped` fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_REQUESTS = {"pull_object", "confirm_message_received"}


class StoppedRunError(RuntimeError):
    """The run was stopped; Flower's own is a BaseException, which its cleaning up lets through."""


def install() -> None:
    """Let this process's SuperNode clean up after a message of a run that was stopped."""
    from flwr.supernode import start_client_internal

    pull = start_client_internal._pull_and_store_message

    def pull_and_clean_up(**given: Any) -> int | None:
        return pull(**given | {name: _with_error(given[name]) for name in _REQUESTS & given.keys()})

    vars(start_client_internal)["_pull_and_store_message"] = pull_and_clean_up


def _with_error(request: Callable[..., Any]) -> Callable[..., Any]:
    from flwr.supercore.run import RunNotRunningException

    def checked(*words: Any) -> Any:
        try:
            return request(*words)
        except RunNotRunningException as stopped:
            raise StoppedRunError("the run is not running any more") from stopped

    return checked
