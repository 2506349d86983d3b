"""Two linear layers to train, on a ResNet that torchvision trained on ImageNet (MA-Echo)."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.tasks.models.model import Model, Shape


class Frozen(nn.Module):
    """A feature extractor that is never trained, sent or stored.

    Its tensors are not parameters of the surrounding model, so it follows the inputs' device.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self._held = [network.eval().requires_grad_(False)]  # a list hides it from the submodules

    @property
    def network(self) -> nn.Module:
        """The extractor."""
        return self._held[0]

    @torch.no_grad()
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the network's features of the inputs."""
        network = self._held[0].to(inputs.device)
        features: Tensor = network(inputs)
        return features


def frozen_resnet18(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return 512 features of ResNet-18, a layer of 512 with ReLU, and the head.

    MA-Echo's paper says "two fully-connected layers" without the width of the first.
    """
    return _on_resnet("resnet18", input_shape, num_classes, head_bias)


def frozen_resnet34(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> Model:
    """Return the same model on ResNet-34."""
    return _on_resnet("resnet34", input_shape, num_classes, head_bias)


def _on_resnet(name: str, input_shape: Shape, num_classes: int, head_bias: bool | None) -> Model:
    from torchvision.models import get_model, get_model_weights

    if input_shape[0] != 3:
        raise ConfigError(
            f"task.model=frozen_{name} is for colour images, but those of this task have "
            f"{input_shape[0]} channels: choose another task.model"
        )
    network, weights = get_model(name), get_model_weights(name).IMAGENET1K_V1
    try:
        network.load_state_dict(weights.get_state_dict(progress=False))
    except OSError as error:
        folder = os.path.join(torch.hub.get_dir(), "checkpoints")
        raise ConfigError(
            f"task.model=frozen_{name} needs torchvision's weights, which are not in {folder} and "
            f"could not be loaded ({error}): put {weights.url} there"
        ) from error
    network.fc = nn.Identity()
    body = nn.Sequential(Frozen(network), nn.Linear(512, 512), nn.ReLU())
    return Model(body, 512, num_classes, head_bias=head_bias is not False)
