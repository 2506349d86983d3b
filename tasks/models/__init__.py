"""The models of the papers, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from fedhet.common.errors import ConfigError, require_choice
from fedhet.tasks.models.bilstm import bilstm
from fedhet.tasks.models.convolutional import fedavg_cnn, feddw_cnn, gn_cnn, maecho_cnn
from fedhet.tasks.models.cvae import CVAE, cvae
from fedhet.tasks.models.frozen import frozen_resnet18, frozen_resnet34
from fedhet.tasks.models.mlp import mlp
from fedhet.tasks.models.mobile import feddw_mobilenetv2, feddw_shufflenet
from fedhet.tasks.models.model import Model
from fedhet.tasks.models.resnet import feddw_resnet18, resnet8, resnet18_bn, resnet18_gn
from fedhet.tasks.models.vgg import vgg11

ON_IMAGES: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "fedavg_cnn": fedavg_cnn,
    "feddw_cnn": feddw_cnn,
    "gn_cnn": gn_cnn,
    "maecho_cnn": maecho_cnn,
    "vgg11": vgg11,
    "resnet8": resnet8,
    "feddw_resnet18": feddw_resnet18,
    "feddw_shufflenet": feddw_shufflenet,
    "feddw_mobilenetv2": feddw_mobilenetv2,
    "resnet18_gn": resnet18_gn,
    "resnet18_bn": resnet18_bn,
}
WITH_STEM = ("resnet18_gn", "resnet18_bn")
ON_TEXT: dict[str, Callable[..., Model]] = {"bilstm": bilstm}
MODELS = (*ON_IMAGES, *ON_TEXT)
# Generators of images given the class, not classifiers.
CONDITIONAL: dict[str, Callable[..., CVAE]] = {"cvae": cvae}
# On networks whose weights torchvision downloads.
PRETRAINED: dict[str, Callable[..., Model]] = {
    "frozen_resnet18": frozen_resnet18,
    "frozen_resnet34": frozen_resnet34,
}
ALL: dict[str, Callable[..., Model | CVAE]] = {**ON_IMAGES, **ON_TEXT, **CONDITIONAL, **PRETRAINED}

__all__ = ["CONDITIONAL", "MODELS", "Model", "build_model"]


def build_model(
    name: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    head_bias: bool | None = None,
    head_init: str | None = None,
    stem: str | None = None,
    vocabulary_size: int | None = None,
    seed: int,
) -> Model | CVAE:
    """Return a freshly initialised model on the CPU; the same seed gives the same parameters.

    Args:
        name: one of MODELS, CONDITIONAL or PRETRAINED.
        input_shape: (C, H, W) of images, (T,) of texts.
        num_classes: the number of outputs.
        head_bias: None: as in the model's paper.
        head_init: orthogonal: the classifier starts with orthonormal rows and a bias of zero;
            None: PyTorch's.
        stem: of a ResNet-18: imagenet or cifar; None: as in the model's paper.
        vocabulary_size: number of tokens, for texts.
        seed: of the initial parameters; the global random state is not changed.

    Raises:
        ConfigError: for an unknown name, a model for other inputs, a stem or head_init that the
            model does not have, too small images, or missing weights.
    """
    require_choice("task.model", name, ALL)
    build = _builder(name, input_shape, stem, vocabulary_size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs, too
        model = build(num_classes=num_classes, head_bias=head_bias)
        if head_init is not None:  # last, so that the body stays the same
            require_choice("task.head_init", head_init, ("orthogonal",))
            _start_orthogonal(name, model)
        return model


def _start_orthogonal(name: str, model: Model | CVAE) -> None:
    """Give the classifier orthonormal rows and a bias of zero."""
    if isinstance(model, CVAE):
        raise ConfigError(
            f"task.head_init=orthogonal is for classifiers, and task.model={name} is none: "
            "set task.head_init=null"
        )
    num_classes, features = model.head.weight.shape
    if num_classes > features:
        raise ConfigError(
            f"task.head_init=orthogonal: {num_classes} rows cannot be at right angles in the "
            f"{features} dimensions of task.model={name}'s features: set task.head_init=null"
        )
    nn.init.orthogonal_(model.head.weight)
    if model.head.bias is not None:
        nn.init.zeros_(model.head.bias)


def _builder(
    name: str, input_shape: tuple[int, ...], stem: str | None, vocabulary_size: int | None
) -> Callable[..., Model | CVAE]:
    """Return the model's function with the arguments that only this model takes."""
    if (name in ON_TEXT) != (len(input_shape) == 1):
        made_for, others = ("texts", ON_IMAGES) if name in ON_TEXT else ("images", ON_TEXT)
        raise ConfigError(
            f"task.model={name} is for {made_for} and an input of this task has the shape "
            f"{input_shape}: choose a task.model of {', '.join(others)}, or another task"
        )
    if stem is not None and name not in WITH_STEM:
        raise ConfigError(
            f"task.stem={stem} is for {' and '.join(WITH_STEM)}; task.model={name} has none"
        )
    if name in ON_TEXT:
        if vocabulary_size is None:
            raise ConfigError(f"task.model={name} needs task.vocabulary_size")
        return partial(ALL[name], vocabulary_size=vocabulary_size)
    if name in WITH_STEM:
        return partial(ALL[name], input_shape, stem=stem)
    return partial(ALL[name], input_shape)
