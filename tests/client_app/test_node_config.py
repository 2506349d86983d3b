"""A node's own config overrides the recipe: its data folder, state folder and device."""

import faulthandler
from functools import partial

import numpy as np
import pytest
from flwr.app import Message
from PIL import Image

from tests.recipes import run_recipe
from tests.refused import refused

pytestmark = pytest.mark.slow

RECIPE = ["task=image_folder", "task.classes=[cat,dog]", "task.image_size=12", "task.model=mlp"]
RECIPE += ["partition=site", "clients=3", "rounds=1", "local.batch_size=4", "device=cpu"]
RECIPE += ["local.epochs=1", "local.momentum=0", "runtime.channels_last=false"]
RECIPE += ["runtime.simulation=false"]
IMAGES = {0: {"cat": 2}, 1: {"cat": 1, "dog": 3}, 2: {"dog": 3}}


@pytest.fixture(autouse=True)
def no_timer(monkeypatch):
    """Let no client end its process when it is late: here that is the tests' own."""
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *args, **named: None)


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    sites, random = tmp_path_factory.mktemp("sites"), np.random.default_rng(9)
    folders = {sites / f"site-{site}" / "data" / "train": held for site, held in IMAGES.items()}
    for folder, held in (folders | {sites / "server" / "test": {"cat": 4, "dog": 1}}).items():
        for name, count in held.items():
            (folder / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return sites


def node(sites, client):
    site = sites / f"site-{client}"
    return {"data-folder": str(site / "data"), "state-folder": str(site / "state")}


def test_every_node_trains_on_its_own_folder_and_keeps_its_own_state(sites, tmp_path):
    counts = {}

    def seen(reply: Message) -> Message:
        if "class_counts" in reply.content:
            client = int(reply.content["metrics"]["partition-id"])
            counts[client] = reply.content["class_counts"]["counts"].numpy().tolist()
        return reply

    words = [*RECIPE, f"task.path={sites / 'server'}", "strategy=[ensemble,scaffold]"]
    summary = run_recipe(tmp_path, *words, tamper=seen, node_config=partial(node, sites))
    assert summary["failures"] == 0
    assert counts == {0: [2, 0], 1: [1, 3], 2: [0, 3]}
    assert summary["accuracy"] * 5 == pytest.approx(round(summary["accuracy"] * 5))
    for client in IMAGES:
        found = list((sites / f"site-{client}" / "state").rglob("*.safetensors"))
        assert [path.parent.name for path in found] == [f"client-{client:05}"]
    assert not (tmp_path / "client_state").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"device": "moon"}, "101 device"), ({"data-folder": ""}, "101 data-folder")],
)
def test_a_node_that_cannot_take_part_says_why(wrong, message, sites, tmp_path):
    words = [*RECIPE, f"task.path={sites / 'server'}", "runtime.connect_timeout_seconds=0.1"]
    own = {client: node(sites, client) | (wrong if client == 1 else {}) for client in IMAGES}
    with refused(*message.split(), kind=TimeoutError):
        run_recipe(tmp_path, *words, node_config=own.__getitem__)


@pytest.mark.slow
def test_a_path_whose_content_has_changed_is_read_anew(tmp_path):
    """In the same process, with the same recipe."""
    table, hashes = tmp_path / "rows.csv", set()
    words = ["task=tabular", f"task.path={table}", "task.target=y", "partition=iid", "clients=2"]
    for count in (40, 80):
        rows = [f"{n},{'yn'[n % 2]}" for n in range(count)]
        table.write_text("\n".join(["a,y", *rows]))
        sizes = []

        def seen(reply, sizes=sizes):
            sizes += [metrics["num-examples"] for metrics in reply.content.metric_records.values()]
            return reply

        folder = tmp_path / f"{count}"
        hashes.add(run_recipe(folder, *words, "rounds=1", tamper=seen)["parameters_sha256"])
        assert count * 0.4 in sizes
    assert len(hashes) == 2
