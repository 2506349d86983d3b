"""As many clients as a column has values, where the recipe has more than that and nobody typed it.

So ``partition=natural`` needs no ``clients=4`` for a table of four hospitals.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from omegaconf import DictConfig

from fedhet.common.errors import ConfigError


def count_elsewhere(recipe: DictConfig) -> int | None:
    """Count in another process: this one will fork, and reading a table starts threads."""
    kind = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(kind)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_count, args=(recipe, theirs))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        found: int | None = ours.recv()
    except EOFError:  # it was killed
        found = None
    process.join()
    return found


def _send_count(recipe: DictConfig, connection: Connection) -> None:
    connection.send(count_here(recipe))


def count_here(recipe: DictConfig) -> int | None:
    """Return how many clients the data of a recipe name; None if they do not."""
    from fedhet.server_app.assembly import task_of

    try:
        return task_of(recipe).num_natural_clients
    except (ConfigError, OSError):  # the run itself will say what is wrong with the data
        return None


def with_natural_clients(
    recipe: DictConfig,
    words: Sequence[str],
    count: Callable[[DictConfig], int | None] = count_elsewhere,
) -> list[str]:
    """Set the recipe's number of clients to that of the data, if it is smaller.

    Returns:
        The overrides, with that number.
    """
    typed = any(word.lstrip("+").startswith("clients=") for word in words)
    # other tasks would decode their images here
    tells = recipe.task.get("inputs") == "own" or recipe.task.get("source") == "image_folder"
    natural = recipe.partition.name == "natural" and recipe.runtime.simulation
    if typed or not tells or not natural:
        return list(words)
    found = count(recipe)
    if found is None or found >= int(recipe.clients):
        return list(words)
    recipe.clients = found
    return [*words, f"clients={found}"]
