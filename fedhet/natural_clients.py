"""As many clients as a column has values, where the recipe has more than that and nobody typed it.

So ``partition=natural`` needs no ``clients=4`` for a table of four hospitals.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from omegaconf import DictConfig

from fedhet.common.errors import ConfigError


def with_natural_clients(recipe: DictConfig, words: Sequence[str]) -> list[str]:
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
    count = _counted_elsewhere(recipe)
    if count is None or count >= int(recipe.clients):
        return list(words)
    recipe.clients = count
    return [*words, f"clients={count}"]


def _counted_elsewhere(recipe: DictConfig) -> int | None:
    """Count in another process: this one will fork, and reading a table starts threads."""
    kind = "fork" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(kind)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_count, args=(recipe, theirs))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    try:
        found: int | None = ours.recv()
    except EOFError:  # the run itself will say what is wrong with the data
        found = None
    process.join()
    return found


def _count(recipe: DictConfig, connection: Connection) -> None:
    from fedhet.server_app.assembly import task_of

    try:
        found = task_of(recipe).num_natural_clients
    except (ConfigError, OSError):
        found = None
    connection.send(found)
