"""Issue: Flower's grids look for replies seldom, and end a run at the first error of a SuperLink.

Flower looks for replies every 0.1 s in a simulation, and for an array that is still on its way
after 1 s, 2 s, 4 s, ... (at most 10 s). A SuperLink whose database is locked answers
"500 Internal Server Error", or that it has not stored an object, and with both Flower's own grid
ends the run. The same request succeeds a moment later.

Uses: `pull_interval` of the simulation's grid; of `HttpGrid` the attributes `_runtime_client` and
`_retry_invoker`, and the name `pull_objects` in its module.
Releases: 1.39 to 1.42. A grid that lacks one of these works more slowly, not wrongly. Not needed
when the first assertions of the tests in `tests/server_app/test_polling_grid.py`, which show
Flower's own grid, fail.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from threading import get_ident
from typing import Any

from flwr.serverapp import Grid

_SIMULATION_SECONDS = 0.02
_SERVER_ERROR = 500
_ERRORS_SECONDS = 300.0  # how long a SuperLink may answer one request with these
_REFUSALS_SECONDS, _PAUSE_SECONDS = 60.0, 1.0  # how long it may refuse an object; between tries
# Between two looks for an array, until Flower's own limit of two hours.
_ARRAY_SECONDS = {"initial_backoff": 0.1, "backoff_cap": 1.0, "max_tries_per_object": None}


def is_simulated(grid: Grid) -> bool:
    """Return whether this is the grid of Flower's simulation."""
    return hasattr(grid, "pull_interval")


def is_flowers(grid: Grid) -> bool:
    """Return whether a grid is a class of Flower's."""
    return type(grid).__module__.startswith("flwr.")


def is_deployed(grid: Grid) -> bool:
    """Return whether this is Flower's grid of a deployment, which speaks with a SuperLink."""
    return is_flowers(grid) and hasattr(type(grid), "_runtime_client")


def poll_simulation_often(grid: Any) -> None:
    """Let the grid of a simulation look for replies sooner."""
    grid.pull_interval = _SIMULATION_SECONDS


def outlast_errors(grid: Any) -> None:
    """Let a grid ask again for some minutes when its SuperLink answers with an error of its own.

    A message that the SuperLink has already is no error to it. A reply that it had marked as
    delivered before the error is lost: the round misses it at its timeout.
    """
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is None:  # another Flower's
        return
    gives_up, on_success = invoker.should_giveup, invoker.on_success
    began: dict[int, float] = {}  # by thread: each makes one request at a time

    def should_giveup(error: Exception) -> bool:
        answer = getattr(error, "response", None)
        if answer is None or answer.status_code != _SERVER_ERROR:
            began.pop(get_ident(), None)
            return bool(gives_up(error))
        waited = time.monotonic() - began.setdefault(get_ident(), time.monotonic())
        if waited <= _ERRORS_SECONDS:
            return False
        del began[get_ident()]
        return True

    def succeeded(state: Any) -> None:
        began.pop(get_ident(), None)
        on_success(state)

    invoker.should_giveup, invoker.on_success = should_giveup, succeeded


def outlast_refusals(grid: Any) -> None:
    """Let a grid push an object again that its SuperLink has not stored.

    It answers so when its database is locked, and when the push is no longer awaited.
    """
    client = grid._runtime_client
    push = getattr(client, "PushObject", None)
    if push is None:  # another Flower's
        return

    def push_until_stored(request: Any) -> Any:
        began = time.monotonic()
        while not (answer := push(request)).stored:
            if time.monotonic() - began >= _REFUSALS_SECONDS:
                break
            time.sleep(_PAUSE_SECONDS)
        return answer

    client.PushObject = push_until_stored


def notice_arrays(grid: Grid) -> None:
    """Let a grid's module notice the arrays of a reply sooner."""
    module = sys.modules.get(type(grid).__module__)
    pull = getattr(module, "pull_objects", None)
    if pull is not None and not isinstance(pull, partial):
        vars(module)["pull_objects"] = partial(pull, **_ARRAY_SECONDS)
