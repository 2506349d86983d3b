"""The conditional auto-encoder and models on a frozen pretrained network."""

import copy
from urllib.error import URLError

import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence

from fedhet.tasks import build_model
from fedhet.tasks.evaluation import evaluate_model
from fedhet.tasks.models.cvae import CVAE
from tests.refused import refused
from tests.tasks.generated import make_task


def test_the_decoder_is_the_papers_and_the_encoder_its_mirror_image():
    """MA-Echo, Section 7: 30 -> 256 -> 512 -> 784."""
    model = build_model("cvae", input_shape=(1, 28, 28), num_classes=10, seed=0)
    shapes = [tuple(value.shape) for value in model.parameters()]
    sizes = [shape[::-1] for shape in shapes if len(shape) == 2]
    assert sizes[:3] == [(794, 512), (512, 256), (256, 40)]
    assert sizes[3:] == [(30, 256), (256, 512), (512, 784)]
    assert shapes[-model.classifier_tensors :] == [(784, 512), (784,)]


def test_the_outputs_are_the_two_parts_of_the_evidence_lower_bound():
    model = CVAE(pixels=7, num_classes=3, latent=4)
    pixels = torch.rand(5, 7, generator=torch.Generator().manual_seed(1))
    inputs = torch.cat([pixels, torch.eye(3)[torch.arange(5) % 3]], dim=1)
    state = torch.get_rng_state()
    means, parts = model.eval()(inputs)
    assert torch.equal(model(inputs)[1], parts)  # in evaluation the samples are the same
    assert torch.equal(torch.get_rng_state(), state)
    mean, log_variance = model.encoder(inputs).chunk(2, dim=1)
    posterior = Normal(mean, (log_variance / 2).exp())
    divergence = kl_divergence(posterior, Normal(torch.zeros(4), torch.ones(4))).sum(1)
    noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    logits = model.decode(mean + posterior.stddev * noise, inputs[:, 7:])
    pixels = -Bernoulli(logits=logits, validate_args=False).log_prob(inputs[:, :7]).sum(1)
    torch.testing.assert_close(parts, torch.stack([pixels, divergence], dim=1))
    torch.testing.assert_close(means, mean)
    first, second = model.train()(inputs)[1], model(inputs)[1]  # in training they are new
    assert not torch.equal(first[:, 0], second[:, 0])
    assert torch.equal(first[:, 1], second[:, 1])


def test_inputs_are_pixels_and_the_class_and_the_loss_is_the_mean_of_both_parts():
    pixels = {"mean": [0.0], "std": [1.0]}
    task, plain = make_task("digits", model="cvae", **pixels), make_task("digits", **pixels)
    (inputs, labels), (images, same) = (
        next(each.test_data().batches(360, generator=None, train=False)) for each in (task, plain)
    )
    assert torch.equal(inputs, torch.cat([images.flatten(1), torch.eye(10)[labels]], dim=1))
    assert torch.equal(labels, same)
    model = task.build_model(0)
    loss, accuracy = evaluate_model(model, task.test_data(), task.loss, batch_size=500)
    with torch.no_grad():
        parts = model.eval()(inputs)[1]
    assert loss == pytest.approx(float(parts.sum() / len(labels)), rel=1e-5)
    assert accuracy is None


def build_frozen():
    return build_model("frozen_resnet18", input_shape=(3, 32, 32), num_classes=7, seed=0)


@pytest.fixture
def models():
    from torchvision import models  # two seconds

    return models


@pytest.mark.slow
def test_a_frozen_network_stays_as_it_is_and_only_linear_layers_train(models, monkeypatch):
    """Its BatchNorm keeps its statistics, and no gradient reaches it; the weights are random."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = models.resnet18().eval()
    state = copy.deepcopy(network.state_dict())
    monkeypatch.setattr(models.ResNet18_Weights, "get_state_dict", lambda self, **_: state)
    network.fc = torch.nn.Identity()
    model = build_frozen().train()
    names = ["body.1.weight", "body.1.bias", "head.weight", "head.bias"]
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) == names
    inputs = torch.randn(4, 3, 32, 32)
    expected = model.body[1:](network(inputs))
    for _ in range(2):
        features, logits = model(inputs)
        torch.testing.assert_close(features, expected)
        logits.sum().backward()
    torch.testing.assert_close(copy.deepcopy(model).eval()(inputs)[0], expected)


@pytest.mark.slow
def test_missing_pretrained_weights_are_named(models, monkeypatch):
    def fail(self, **options):
        raise URLError("no network")

    monkeypatch.setattr(models.ResNet18_Weights, "get_state_dict", fail)
    with refused("frozen_resnet18"):
        build_frozen()
