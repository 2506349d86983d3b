"""MA-Echo's Figure 4: digits that decoders generate."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedhet.report.data_file import Partition
from fedhet.report.layout import automatic_layout
from fedhet.report.paper_figures import with_figures
from fedhet.report.run_data import read_run
from fedhet.reproductions.maecho import generated_images as module
from fedhet.reproductions.maecho.decoder_data import SAMPLES, decode, read_generated
from fedhet.reproductions.maecho.generated_images import generated, generated_of
from fedhet.strategies.base import Cohort, Reply
from fedhet.strategies.round.client_snapshots import FILE, ClientSnapshots
from fedhet.tasks.models.cvae import CVAE
from tests.strategies.sides import total_of

SIDE, CLASSES = 4, 3
TASK = {"model": "cvae", "image_size": SIDE, "channels": 1, "num_classes": CLASSES}


def a_model(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return CVAE(SIDE * SIDE, CLASSES, latent=5)


def shared(seed, prefix):
    state = a_model(seed).state_dict()
    return {name: value for name, value in state.items() if name.startswith(prefix)}


@pytest.fixture
def write(write_run):
    """Return a function that writes a run whose final model and clients have these seeds."""

    def write_and_read(final, clients=(), method="maecho", prefix="decoder.", **settings):
        task = {f"task__{key}": value for key, value in TASK.items()}
        folder = write_run(method, **task, paper={"name": "maecho"}, **settings)
        save_file(shared(final, prefix), folder / "model.safetensors")
        params = {name: torch.zeros_like(value) for name, value in shared(0, prefix).items()}
        replies = [Reply(n, 1, 1, 0.1, shared(seed, prefix)) for n, seed in enumerate(clients)]
        if replies:
            cohort = Cohort(1, len(replies), len(replies))
            ClientSnapshots(folder / FILE)(params, total_of(replies), replies, cohort)
        run = read_run(folder, folder.name, 0)
        return with_figures([run], [automatic_layout([run])], print)[0]

    return write_and_read


def test_it_decodes_as_the_model_does():
    model = a_model(1)
    layers = [(v.weight.detach().numpy(), v.bias.detach().numpy()) for v in model.decoder[::2]]
    latents = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    found = decode(layers, latents.double().numpy(), CLASSES)
    for label in range(CLASSES):
        classes = torch.eye(CLASSES)[label].expand(6, CLASSES)
        expected = torch.sigmoid(model.decode(latents, classes)).detach().numpy()
        assert np.allclose(found[:, label], expected, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["decoder.", ""])
def test_images_are_of_the_final_model_and_of_each_client(write, prefix):
    """With or without a shared encoder; the latents are the same for all."""
    found = generated_of(write(1, (2, 3), prefix=prefix))
    alone = {seed: generated_of(write(seed, prefix=prefix, seed=seed)).model for seed in (1, 2, 3)}
    assert found.model == alone[1]
    assert found.clients == {"0": alone[2], "1": alone[3]}
    images = found.images(alone[1])
    assert images.shape == (SAMPLES, CLASSES, SIDE, SIDE)
    assert images.std() > 0
    gray = {f"task.{key}": value for key, value in TASK.items()}
    folder = write(1, prefix=prefix, seed=4).folder
    assert read_generated(folder, gray) is not None
    for other in ({"task.model": "mlp"}, {"task.channels": 3}):
        assert read_generated(folder, {**gray, **other}) is None
    assert read_generated(folder.parent, gray) is None  # no model there


@pytest.mark.slow
def test_classes_without_examples_are_grey(write, tmp_path, monkeypatch):
    run = write(4, (1, 2))
    partition = Partition("p", {}, ("a", "b", "c"), [[5, 0, 1], [0, 7, 0]], clients=2)
    monkeypatch.setattr(module, "partition_of", lambda run, counted: counted[0])
    found = module._decoders("maecho", run, module.generated_of(run), [partition])
    assert [d.trained for d in found] == [[True, False, True], [False, True, False], [True] * 3]
    blocks = generated(automatic_layout([run]), [partition], tmp_path / "report")
    assert "Grey: classes without examples" in blocks[-1].caption
    assert "client 1" in blocks[-1].svg
    assert (tmp_path / "report_generated.png").stat().st_size > 5_000
