"""Runs a recipe through both apps in this process: Flower's messages, no Ray."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from flwr.app import Context, Message, RecordDict

from client_app.app import app as client_app
from conf import compose
from server_app import app as server
from tests.deployed import RECIPE
from tests.federation import InProcessGrid

TINY = [*RECIPE, "task.train_size=600", "task.test_size=120"]


def overrides(*words: str) -> dict[str, str]:
    return {"overrides": json.dumps(list(words))}


def grid_of(
    words: Sequence[str],
    clients: int,
    tamper: Callable[[Message], Message | None] = lambda reply: reply,
    node_config: Callable[[int], dict[str, str]] = lambda client: {},
) -> InProcessGrid:
    """Return a grid of real ClientApps, each with its own Context."""

    def node(client: int) -> Callable[[Message], Message]:
        context = Context(
            run_id=1,
            node_id=client + 1,
            node_config={"partition-id": client, "num-partitions": clients, **node_config(client)},
            state=RecordDict(),
            run_config=overrides(*words),
        )
        return lambda message: client_app(message, context)

    return InProcessGrid({100 + client: node(client) for client in range(clients)}, tamper)


def run_recipe(
    folder: Path,
    *words: str,
    clients: int = 3,
    tamper: Callable[[Message], Message | None] = lambda reply: reply,
    node_config: Callable[[int], dict[str, str]] = lambda client: {},
) -> dict:
    """Run a recipe into ``folder``; return its summary. It has fewer nodes if it says so."""
    words = (*words, f"results_dir={folder}")
    clients = min(clients, int(compose(overrides(*words)).clients) or clients)
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=overrides(*words)
    )
    server.main(grid_of(words, clients, tamper, node_config), context)
    return json.loads((folder / "summary.json").read_text())
