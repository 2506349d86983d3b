"""The models of the papers, by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedhet.common.errors import ConfigError, require_choice
from fedhet.common.task_settings import Lora
from fedhet.tasks.models.bilstm import bilstm
from fedhet.tasks.models.convolutional import bn_cnn, fedavg_cnn, feddw_cnn, gn_cnn, maecho_cnn
from fedhet.tasks.models.cvae import CVAE, cvae
from fedhet.tasks.models.frozen import frozen_resnet18, frozen_resnet34
from fedhet.tasks.models.lora import add_adapters
from fedhet.tasks.models.mlp import mlp
from fedhet.tasks.models.mobile import feddw_mobilenetv2, feddw_shufflenet
from fedhet.tasks.models.model import Model
from fedhet.tasks.models.resnet import feddw_resnet18, resnet8, resnet18_bn, resnet18_gn
from fedhet.tasks.models.vgg import vgg11
from fedhet.tasks.models.wrapped import WrappedModel, last_layer
from fedhet.tasks.references import (
    Function,
    call_with_known,
    is_reference,
    load_reference,
    name_of,
)

ON_IMAGES: dict[str, Callable[..., Model]] = {
    "mlp": mlp,
    "fedavg_cnn": fedavg_cnn,
    "feddw_cnn": feddw_cnn,
    "gn_cnn": gn_cnn,
    "bn_cnn": bn_cnn,
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
# Generators of images for a given class, not classifiers.
CONDITIONAL: dict[str, Callable[..., CVAE]] = {"cvae": cvae}
# Models on networks whose weights torchvision downloads.
PRETRAINED: dict[str, Callable[..., Model]] = {
    "frozen_resnet18": frozen_resnet18,
    "frozen_resnet34": frozen_resnet34,
}
ALL: dict[str, Callable[..., Model | CVAE]] = {**ON_IMAGES, **ON_TEXT, **CONDITIONAL, **PRETRAINED}

AnyModel = Model | CVAE | WrappedModel

__all__ = ["CONDITIONAL", "MODELS", "AnyModel", "Head", "Model", "build_model", "build_own_model"]


@dataclass(frozen=True)
class Head:
    """How a model's classifier is made.

    Attributes:
        classifier: of the user's own model the path of the module that makes the outputs; None: the
            last linear layer.
        bias: None: as in the model's paper; False: without one.
        init: orthogonal: it starts with orthonormal rows and a bias of zero; None: as in PyTorch.
    """

    classifier: str | None = None
    bias: bool | None = None
    init: str | None = None


def build_model(
    name: str,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    head: Head = Head(),
    options: Mapping[str, Any] | None = None,
    lora: Lora | None = None,
    stem: str | None = None,
    vocabulary_size: int | None = None,
    seed: int,
) -> AnyModel:
    """Return a freshly initialised model on the CPU; the same seed gives the same parameters.

    Args:
        name: one of MODELS, CONDITIONAL or PRETRAINED, or ``package.module:function``.
        input_shape: (C, H, W) of images, (T,) of texts.
        num_classes: the number of outputs.
        head: how the classifier is made.
        options: further arguments of the user's own model function.
        lora: for the user's own model, see :func:`~fedhet.tasks.models.lora.add_adapters`.
        stem: for a ResNet-18: imagenet or cifar; None: as in the model's paper.
        vocabulary_size: number of tokens, for texts.
        seed: seed of the initial parameters; the global random state does not change.

    Raises:
        ConfigError: for an unknown name, a model for other inputs, a stem or head that the model
            does not have, too small images, or missing weights.
    """
    if is_reference(name):
        known = {"input_shape": input_shape, "num_classes": num_classes}
        if vocabulary_size is not None:
            known["vocabulary_size"] = vocabulary_size
        function = load_reference("task.model", name)
        return build_own_model(function, known, options or {}, head=head, lora=lora, seed=seed)
    require_choice("task.model", name, ALL)
    own = (("classifier", head.classifier), ("model_options", options), ("lora", lora))
    for key, value in own:
        if value:
            raise ConfigError(
                f"task.{key}={value} is for your own models, but task.model={name} is one of "
                f"fedhet's: set task.{key}=null"
            )
    build = _builder(name, input_shape, stem, vocabulary_size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs, too
        model = build(num_classes=num_classes, head_bias=head.bias)
        if head.init is not None:  # last, so that the body stays the same
            _start_orthogonal(name, head.init, model)
        return model


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Seed the generators that a user's function draws from; restore their state afterwards."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed the GPUs, too
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def build_own_model(
    function: Function,
    known: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    head: Head = Head(),
    lora: Lora | None = None,
    classifies: bool = True,
    seed: int,
) -> WrappedModel:
    """Return the model that a user's function builds, wrapped; see :func:`build_model`.

    Args:
        function: returns an ``nn.Module``.
        known: values for its parameters, by name.
        options: further arguments.
        head: how the classifier is made.
        lora: adapters to train instead of the network; None: train all of it.
        classifies: whether the outputs are logits of classes.
        seed: seed of the initial parameters, for torch's, NumPy's and Python's generators.
    """
    if isinstance(function, nn.Module):
        kind = type(function).__name__
        raise ConfigError(f"task.model names a {kind} itself: name the function that makes one")
    with _drawn_from(seed):
        network = call_with_known("task.model", function, known, options)
        if not isinstance(network, nn.Module):
            raise ConfigError(
                f"task.model={name_of(function)} returned a {type(network).__name__}: it must "
                "return an nn.Module"
            )
        if lora is not None:
            head = replace(head, classifier=head.classifier or last_layer(network))
            add_adapters(network, lora, str(head.classifier))
        model = WrappedModel(network, head.classifier, head_bias=head.bias, classifies=classifies)
        if head.init is not None:
            _start_orthogonal(name_of(function), head.init, model)
        return model


def _start_orthogonal(name: str, head_init: str, model: AnyModel) -> None:
    """Give the classifier orthonormal rows and a bias of zero."""
    require_choice("task.head_init", head_init, ("orthogonal",))
    if isinstance(model, CVAE) or not isinstance(model.head, nn.Linear):
        raise ConfigError(
            f"task.head_init=orthogonal is for classifiers, but task.model={name} is not one: "
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
            f"task.model={name} is for {made_for}, but an input of this task has the shape "
            f"{input_shape}: choose a task.model of {', '.join(others)}, one of your own (for "
            "rows of numbers fedhet.tasks.tabular:mlp), or another task"
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
