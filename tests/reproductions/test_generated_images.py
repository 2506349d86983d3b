"""Generated digits on the page."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedhet.report import command
from fedhet.report.blocks import Gallery
from fedhet.report.data_file import Partition
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import read_run
from reproductions.maecho import generated_images as module
from reproductions.maecho.decoder_data import SAMPLES, decode, read_generated
from reproductions.maecho.generated_images import generated
from strategies.base import Reply
from strategies.round.client_snapshots import FILE, ClientSnapshots
from tasks.models.cvae import CVAE

SIDE, CLASSES = 4, 3
TASK = {
    "task__model": "cvae",
    "task__image_size": SIDE,
    "task__channels": 1,
    "task__num_classes": CLASSES,
}


def a_model(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CVAE(SIDE * SIDE, CLASSES, latent=5)


def shared(model, prefix=""):
    return {name: v for name, v in model.state_dict().items() if name.startswith(prefix)}


@pytest.fixture
def write(write_run):
    """Return a function that writes a run whose final model and clients have these seeds."""

    def write_and_read(final, clients=(), method="maecho", prefix="decoder.", **settings):
        folder = write_run(method, **TASK, **settings)
        save_file(shared(a_model(final), prefix), folder / "model.safetensors")
        params = {n: torch.zeros_like(v) for n, v in shared(a_model(0), prefix).items()}
        replies = [Reply(n, 1, 1, 0.1, shared(a_model(s), prefix)) for n, s in enumerate(clients)]
        if replies:
            ClientSnapshots(folder / FILE)(params, replies)
        return read_run(folder, folder.name, 0)

    return write_and_read


def gallery_of(runs, tmp_path, partitions=()):
    blocks = generated(automatic_layout(runs), lambda: partitions, tmp_path / "report")
    return next((block for block in blocks if isinstance(block, Gallery)), None)


def titles_of(runs, tmp_path, partitions=()):
    return [drawing.label for drawing in gallery_of(runs, tmp_path, partitions).drawings]


def test_it_decodes_as_the_model_does():
    model = a_model(1)
    layers = [(v.weight.detach().numpy(), v.bias.detach().numpy()) for v in model.decoder[::2]]
    latents = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    found = decode(layers, latents.double().numpy(), CLASSES)
    for label in range(CLASSES):
        classes = torch.eye(CLASSES)[label].expand(6, CLASSES)
        expected = torch.sigmoid(model.decode(latents, classes)).detach().numpy()
        assert np.allclose(found[:, label], expected, atol=1e-6)


@pytest.mark.parametrize("prefix", ["decoder.", ""])
def test_what_is_read_is_of_the_final_model_and_of_each_client(write, prefix):
    """Whether or not the encoder was shared, too; the latents are the same for all."""
    run = write(1, (2, 3), prefix=prefix)
    alone = {seed: write(seed, prefix=prefix, seed=seed).generated.model for seed in (1, 2, 3)}
    assert run.generated.model == alone[1]
    assert run.generated.clients == {"0": alone[2], "1": alone[3]}
    images = run.generated.images(alone[1])
    assert images.shape == (SAMPLES, CLASSES, SIDE, SIDE)
    assert images.std() > 0


def test_other_runs_have_none(write_run, write, tmp_path):
    classifier = read_run(write_run(), "plain", 0)
    colour = {"task.model": "cvae", "task.channels": 3, "task.image_size": SIDE}
    assert classifier.generated is None
    assert read_generated(tmp_path, colour | {"task.num_classes": CLASSES}) is None
    assert (
        read_generated(tmp_path, {"task.model": "cvae", "task.channels": 1, "task.image_size": 4})
        is None
    )
    assert gallery_of([classifier], tmp_path) is None
    assert gallery_of([classifier, write(1)], tmp_path) is not None


def test_clients_come_first_and_what_is_the_same_comes_once(write, tmp_path):
    average = write(4, (1, 2), method="fedavg")
    assert titles_of([average, write(5, (1, 2))], tmp_path) == [
        *("client 0", "client 1", "fedavg", "maecho")
    ]
    assert titles_of([average, write(5, (1, 3))], tmp_path) == [
        *("client 0 · fedavg", "client 1 · fedavg", "fedavg", "client 1 · maecho", "maecho")
    ]


def test_a_client_alone_is_what_the_run_gives_out(write, tmp_path):
    assert titles_of([write(1, (1,))], tmp_path) == ["maecho"]


def test_images_that_differ_by_rounding_are_the_same():
    one = np.full((1, 1, 2, 2), 100, dtype=np.uint8)
    assert module._same(one, one + module.ROUNDING)
    assert not module._same(one, one + module.ROUNDING + 1)
    assert not module._same(np.zeros_like(one), np.full_like(one, 255))  # no difference modulo 256
    assert not module._same(one, one.reshape(1, 2, 1, 2))


def test_classes_that_a_client_never_saw_are_told_apart(write, tmp_path, monkeypatch):
    run = write(4, (1, 2))
    keys = ("task.name", "partition.name")
    settings = {k: v for k, v in run.settings.items() if k in keys}
    partition = Partition("p", settings, ("a", "b", "c"), [[5, 0, 1], [0, 7, 0]], clients=2)
    monkeypatch.setattr(module, "partition_of", lambda run, counted: counted[0])
    found = module._decoders("maecho", run, [partition])
    assert [d.trained for d in found] == [[True, False, True], [False, True, False], [True] * 3]
    assert "Grey: classes of which" in gallery_of([run], tmp_path, [partition]).caption


@pytest.mark.flower  # it draws pages
def test_the_page_is_made_again_from_its_data_file(write, tmp_path):
    for run in (write(4, (1, 2), method="fedavg"), write(5, (1, 2))):
        path = run.folder / "metrics.jsonl"  # an auto-encoder has no accuracy
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        bare = [{k: v for k, v in row.items() if k != "accuracy"} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in bare))
    command.main([str(tmp_path / "sweep"), "--no-partitions"])
    first = tmp_path / "sweep" / "report"
    command.main([str(first / "report.json"), "--no-partitions", "--out", str(tmp_path / "again")])
    written = {path.name: path.read_bytes() for path in first.iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == written
    assert b"Generated digits" in written["report.html"]
    assert b"report_generated.png" in written["report.md"]
    text = written["report.md"].decode()
    assert "Final loss on the test set." in text
    assert "| fedavg | 0.3 |" in text  # of the third round
    assert "accuracy" not in text.lower()
