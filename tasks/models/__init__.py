"""The papers' models, by name."""

from __future__ import annotations

import torch

from tasks.errors import ConfigError, require_option
from tasks.models.convolutional import fedavg_cnn, feddw_cnn
from tasks.models.mlp import mlp
from tasks.models.model import Model
from tasks.models.resnet import resnet8, resnet18_bn, resnet18_gn
from tasks.models.vgg import vgg11

PLAIN = {
    "mlp": mlp,
    "fedavg_cnn": fedavg_cnn,
    "feddw_cnn": feddw_cnn,
    "vgg11": vgg11,
    "resnet8": resnet8,
}
WITH_STEM = {"resnet18_gn": resnet18_gn, "resnet18_bn": resnet18_bn}
MODELS = (*PLAIN, *WITH_STEM)

__all__ = ["MODELS", "Model", "build_model"]


def build_model(
    name: str,
    *,
    input_shape: tuple[int, int, int],
    num_classes: int,
    head_bias: bool | None = None,
    stem: str | None = None,
    seed: int,
) -> Model:
    """Return a freshly initialised model on the CPU; the same seed gives the same parameters.

    Args:
        name: one of MODELS.
        input_shape: (C, H, W).
        num_classes: outputs.
        head_bias: None: as the model's paper has it.
        stem: of a ResNet-18: imagenet or cifar; None: as the model's paper has it.
        seed: of the initial parameters; the global random state stays as it was.

    Raises:
        ConfigError: for an unknown name, a stem that the model has not, or too small images.
    """
    require_option("task.model", name, MODELS)
    if stem is not None and name not in WITH_STEM:
        raise ConfigError(
            f"task.stem={stem} is for {' and '.join(WITH_STEM)}; task.model={name} has none"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPUs' too
        if name in WITH_STEM:
            return WITH_STEM[name](input_shape, num_classes, head_bias=head_bias, stem=stem)
        return PLAIN[name](input_shape, num_classes, head_bias=head_bias)
