"""The conditional auto-encoder: its sizes, its loss, and what it is told."""

import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence

from common.errors import ConfigError
from tasks import build_model
from tasks.evaluation import evaluate_model
from tasks.models.cvae import CVAE
from tests.tasks.generated import make_task

PIXELS = {"model": "cvae", "mean": [0.0], "std": [1.0]}


def some_inputs(model, count=5):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(count, model.pixels, generator=generator)
    classes = torch.eye(model.num_classes)[torch.arange(count) % model.num_classes]
    return torch.cat([pixels, classes], dim=1)


def linear_sizes(layers):
    return [(layer.in_features, layer.out_features) for layer in layers[::2]]


def test_the_decoder_is_the_papers_and_the_encoder_its_mirror_image():
    """MA-Echo, Section 7: 30 -> 256 -> 512 -> 784."""
    model = build_model("cvae", input_shape=(1, 28, 28), num_classes=10, seed=0)
    assert linear_sizes(model.decoder) == [(30, 256), (256, 512), (512, 784)]
    assert linear_sizes(model.encoder) == [(794, 512), (512, 256), (256, 40)]
    last = list(model.parameters())[-model.classifier_tensors :]
    assert [tuple(value.shape) for value in last] == [(784, 512), (784,)]


def test_the_two_parts_are_those_of_the_evidence_lower_bound():
    model = CVAE(pixels=7, num_classes=3, latent=4).eval()
    inputs = some_inputs(model)
    means, parts = model(inputs)
    mean, log_variance = model.encoder(inputs).chunk(2, dim=1)
    posterior = Normal(mean, (log_variance / 2).exp())
    divergence = kl_divergence(posterior, Normal(torch.zeros(4), torch.ones(4))).sum(1)
    noise = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    logits = model.decode(mean + posterior.stddev * noise, inputs[:, 7:])
    pixels = -Bernoulli(logits=logits, validate_args=False).log_prob(inputs[:, :7]).sum(1)
    torch.testing.assert_close(parts, torch.stack([pixels, divergence], dim=1))
    torch.testing.assert_close(means, mean)


def test_an_untrained_decoder_of_zeros_costs_log_two_a_pixel():
    model = CVAE(pixels=6, num_classes=2, latent=3).eval()
    torch.nn.init.zeros_(model.decoder[-1].weight)
    torch.nn.init.zeros_(model.decoder[-1].bias)
    for parameter in model.encoder.parameters():
        torch.nn.init.zeros_(parameter)  # then the posterior is the prior
    _, parts = model(some_inputs(model))
    expected = torch.tensor([6 * torch.log(torch.tensor(2.0)), 0.0]).expand(5, 2)
    torch.testing.assert_close(parts, expected)


def test_samples_are_new_in_training_and_the_same_in_evaluation():
    model = CVAE(pixels=7, num_classes=3)
    inputs = some_inputs(model)
    torch.manual_seed(0)
    first, second = model.train()(inputs)[1], model(inputs)[1]
    assert not torch.equal(first[:, 0], second[:, 0])
    assert torch.equal(first[:, 1], second[:, 1])
    state = torch.get_rng_state()
    assert torch.equal(model.eval()(inputs)[1], model(inputs)[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_inputs_are_pixels_and_behind_them_the_class():
    task = make_task("digits", **PIXELS)
    plain = make_task("digits", mean=[0.0], std=[1.0])
    for generator in (None, torch.Generator()):
        batches = []
        for each in (task, plain):
            if generator is not None:
                generator.manual_seed(3)
            data, _ = each.client_data(1)
            batches.append(next(data.batches(50, generator=generator, train=True)))
        (inputs, labels), (images, same) = batches
        assert inputs.shape == (50, 64 + 10)
        assert torch.equal(inputs[:, :64], images.flatten(1))
        assert torch.equal(inputs[:, 64:], torch.eye(10)[labels])
        assert torch.equal(labels, same)


def test_the_loss_is_the_mean_of_both_parts_and_there_is_no_accuracy():
    task = make_task("digits", **PIXELS)
    model, data = task.build_model(0), task.test_data()
    loss, accuracy = evaluate_model(model, data, task.loss, batch_size=500)
    (inputs, labels), *others = data.batches(500, generator=None, train=False)
    assert not others
    with torch.no_grad():
        parts = model.eval()(inputs)[1]
    assert loss == pytest.approx(float(parts.sum() / len(labels)), rel=1e-5)
    assert accuracy is None


def test_what_stands_for_a_class_that_is_not_there_is_not_trained():
    """Without weight decay no gradient reaches the columns of a class that a client never saw."""
    task = make_task("digits", **PIXELS)
    model = task.build_model(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data, _ = task.client_data(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for inputs, labels in data.batches(64, generator=None, train=True):
        known = labels < 5
        task.loss(model.train()(inputs[known])[1], labels[known]).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = model.state_dict()
    for name, first in (("encoder.0.weight", 64), ("decoder.0.weight", 20)):
        changed = (after[name] != before[name]).any(dim=0)[first:]
        assert changed.tolist() == [True] * 5 + [False] * 5


def test_pixels_that_are_normalised_are_refused_by_key():
    with pytest.raises(ConfigError, match=r"task\.model=cvae takes pixels in \[0, 1\].*task\.mean"):
        make_task("digits", model="cvae")
    with pytest.raises(ConfigError, match=r"task\.model=cvae is for images"):
        make_task("imdb", model="cvae").build_model(0)
