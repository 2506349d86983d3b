"""Runs a recipe through both apps in this process: Flower's messages, no Ray."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from fedhet.client_app.app import app as client_app
from fedhet.common.results import read_rows
from fedhet.conf import compose, compose_overrides
from fedhet.server_app import app as server
from tests.deployed import RECIPE
from tests.federation import InProcessGrid

TINY = [*RECIPE, "task.train_size=600", "task.test_size=120"]


def overrides(*words: str) -> dict[str, str]:
    return {"overrides": json.dumps(list(words))}


@contextmanager
def changed(words: tuple[str, ...], word: str) -> Iterator[DictConfig]:
    """Yield the recipe of ``words`` with one more; composing anew takes a tenth of a second."""
    recipe, override = compose_overrides(words), OverridesParser.create().parse_override(word)
    parent, _, name = override.key_or_group.rpartition(".")
    content = (OmegaConf.select(recipe, parent) if parent else recipe)._content
    before = dict(content)
    content.update({name: deepcopy(before[name])} if name in before else {})
    OmegaConf.update(recipe, override.key_or_group, override.value(), merge=False, force_add=True)
    try:
        yield recipe
    finally:
        content.clear()
        content.update(before)


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


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of a running run's last round when it is on the disk; None in round 1.

    The run does not wait for it.
    """
    metrics = folder / "metrics.jsonl"
    done = read_rows(metrics)[-1]["round"] if metrics.exists() and metrics.stat().st_size else 0
    if done == 0:
        return None
    path, end = folder / f"checkpoints/round-{done:06}.safetensors", time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} is not written"
        time.sleep(0.002)
    return path
