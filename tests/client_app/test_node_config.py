"""A node's own config overrides the recipe: its data folder, state folder and device."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Message
from PIL import Image

from tests.recipes import run_recipe

pytestmark = pytest.mark.slow

RECIPE = ["task=image_folder", "task.classes=[cat,dog]", "task.image_size=12", "task.model=mlp"]
RECIPE += ["partition=site", "clients=3", "rounds=1", "local.batch_size=4", "device=cpu"]
RECIPE += ["local.epochs=1", "local.momentum=0", "runtime.channels_last=false"]
RECIPE += ["runtime.simulation=false"]
IMAGES = {0: {"cat": 2}, 1: {"cat": 1, "dog": 3}, 2: {"dog": 3}}


def write_images(folder, classes, seed):
    random = np.random.default_rng(seed)
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture
def sites(tmp_path, monkeypatch):
    """Return the folder of three sites, site-<i>/data/train each, and of the server's test set."""
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "cache"))
    for site, classes in IMAGES.items():
        write_images(tmp_path / f"site-{site}" / "data" / "train", classes, site)
    write_images(tmp_path / "server" / "test", {"cat": 4, "dog": 1}, 9)
    return tmp_path


def node(sites, client):
    site = sites / f"site-{client}"
    return {"data-folder": str(site / "data"), "state-folder": str(site / "state")}


def test_every_node_trains_on_its_own_folder_and_keeps_its_own_state(sites):
    counts: dict[int, list[float]] = {}

    def seen(reply: Message) -> Message:
        if "class_counts" in reply.content:
            client = int(reply.content["metrics"]["partition-id"])
            counts[client] = reply.content["class_counts"]["counts"].numpy().tolist()
        return reply

    summary = run_recipe(
        sites / "run",
        *RECIPE,
        *("strategy=[ensemble,scaffold]", f"task.path={sites / 'server'}"),
        tamper=seen,
        node_config=lambda client: node(sites, client),
    )
    assert summary["failures"] == 0
    assert counts == {0: [2, 0], 1: [1, 3], 2: [0, 3]}
    assert summary["accuracy"] * 5 == pytest.approx(round(summary["accuracy"] * 5))
    for client in IMAGES:
        found = list((sites / f"site-{client}" / "state").rglob("*.safetensors"))
        assert [path.parent.name for path in found] == [f"client-{client:05}"]
    assert not (sites / "run" / "client_state").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda node: {**node, "device": "moon"}, "node 101 cannot take part: .*device.*moon"),
        (lambda node: {}, "node 101 cannot take part: .*data-folder"),
    ],
)
def test_a_node_that_cannot_take_part_says_why(config, message, sites):
    def node_config(client: int) -> dict[str, str]:
        own = node(sites, client)
        return config(own) if client == 1 else own

    words = [*RECIPE, f"task.path={sites / 'server'}"]
    with pytest.raises(ValueError, match=message):
        run_recipe(sites / "run", *words, node_config=node_config)
