"""Models on a pretrained network; its weights are drawn here, for tests load nothing."""

import copy
from urllib.error import URLError

import pytest
import torch
from torchvision.models import ResNet18_Weights, resnet18

from common.errors import ConfigError
from tasks import build_model


@pytest.fixture
def pretrained(monkeypatch):
    """Return the network whose weights torchvision is said to have."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        network = resnet18().eval()
    state = copy.deepcopy(network.state_dict())
    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", lambda self, **_: state)
    network.fc = torch.nn.Identity()
    return network


def build():
    return build_model("frozen_resnet18", input_shape=(3, 32, 32), num_classes=7, seed=0)


def test_only_the_linear_layers_are_the_models_own(pretrained):
    model = build()
    names = ["body.1.weight", "body.1.bias", "head.weight", "head.bias"]
    assert [name for name, _ in model.named_parameters()] == list(model.state_dict()) == names


def test_the_network_stays_as_it_is_in_training(pretrained):
    """Its BatchNorm keeps to its statistics, and no gradient reaches it."""
    model = build().train()
    inputs = torch.randn(4, 3, 32, 32)
    expected = model.body[1:](pretrained(inputs))
    for _ in range(2):
        features, logits = model(inputs)
        torch.testing.assert_close(features, expected)
        logits.sum().backward()
    again = copy.deepcopy(model).eval()
    torch.testing.assert_close(again(inputs)[0], expected)


def test_missing_weights_and_grey_images_are_refused_by_key(monkeypatch):
    def fail(self, **options):
        raise URLError("no network")

    monkeypatch.setattr(ResNet18_Weights, "get_state_dict", fail)
    with pytest.raises(ConfigError, match=r"frozen_resnet18 needs .* put https://\S+ there"):
        build()
    with pytest.raises(ConfigError, match=r"task\.model=frozen_resnet18 is for colour images"):
        build_model("frozen_resnet18", input_shape=(1, 28, 28), num_classes=7, seed=0)
