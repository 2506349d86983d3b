"""Any ``nn.Module`` that returns logits, as the body and head that methods are written for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from logging import INFO, getLogger
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedhet.common.errors import ConfigError
from fedhet.tasks.models.attributes import FROZEN
from fedhet.tasks.models.model import refuse_integers

CHANNEL_KEYS = ("channels", "mean", "std")  # of a task on images
HEAD = "head"
_LAST = (nn.Linear, nn.modules.conv._ConvNd)  # what a classifier is, if none is named


class WrappedModel(nn.Module):
    """A user's network whose features are taken at the input of its classifier.

    The classifier becomes ``head`` and everything else is below ``body``. Tensors have these names
    when they travel and when they are stored (:meth:`own_names` returns the network's own names).
    The network computes the same as before. Tensors with ``requires_grad=False`` stay unchanged:
    they are not trained, sent or stored.

    Args:
        network: inputs (B, ...) to outputs; for classification, logits (B, C).
        classifier: path of the module that maps features to outputs, such as ``fc``; None: the last
            linear layer, or the last convolution if there is none.
        head_bias: False removes the classifier's bias.
        classifies: whether the outputs are logits of classes.

    Raises:
        ConfigError: if there is no such module, it has several names, it shares a trained tensor
            with the body, or a lazy layer has no size yet.
    """

    def __init__(
        self,
        network: nn.Module,
        classifier: str | None = None,
        *,
        head_bias: bool | None = None,
        classifies: bool = True,
    ) -> None:
        super().__init__()
        _refuse_lazy(network)
        self.classifier = last_layer(network) if classifier is None else classifier
        self.classifies = classifies
        head = _module(network, self.classifier)
        if head_bias is False:
            _drop_bias(head, self.classifier)
        _hide_frozen(network)
        self.body = _put(network, self.classifier, _Place(self))
        self.head = head
        _refuse_tied(self.body, head, self.classifier)
        self.classifier_tensors = len(list(head.parameters()))
        self._features: Tensor | None = None
        if not any(True for _ in self.parameters()):
            raise ConfigError("the model has no trainable tensor (requires_grad is false for all)")
        self.register_forward_pre_hook(_cast)  # not in forward, which torch.fx traces

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, d) and the network's outputs."""
        try:
            outputs = self.body(inputs)
        except RuntimeError as error:
            refuse_integers(inputs, error)
            raise
        features, self._features = self._features, None
        if features is None:
            raise RuntimeError(
                f"the model's forward does not call its classifier {self.classifier}: name the "
                "module that makes the outputs (task.classifier)"
            )
        return features.flatten(1), _tensor(outputs)

    def classify(self, features: Tensor) -> Tensor:
        """Return the head's outputs, and keep its input."""
        self._features = features
        found: Tensor = self.head(features)
        return found

    def own_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by their names in the user's network."""
        return {own_name(name, self.classifier): value for name, value in tensors.items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Also move frozen tensors, which are no longer parameters."""
        for module in self.modules():
            for name in getattr(module, FROZEN, ()):
                setattr(module, name, fn(getattr(module, name)))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def refuse_channels(model: nn.Module, shape: Sequence[int], keys: Sequence[str]) -> None:
    """Reject images whose channels the model's first convolution does not take.

    Args:
        model: takes batches of images.
        shape: (C, H, W) of an image.
        keys: of the recipe: that of the channels, and those that have a value for each channel.
    """
    layers = (one for one in model.modules() if isinstance(one, nn.Conv2d))
    first = next(layers, None)
    if first is None or first.in_channels == shape[0] or first.in_channels not in (1, 3):
        return
    training = model.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            model.eval()(torch.zeros(2, *shape))  # the first layer need not be the first applied
    except RuntimeError:
        raise ConfigError(
            f"the model takes images of {first.in_channels} channels, and {keys[0]}={shape[0]}: "
            f"set {keys[0]}={first.in_channels}"
            + (f", with as many values in {' and '.join(keys[1:])}" if keys[1:] else "")
            + ", or another task.model"
        ) from None
    finally:
        model.train(training)


def _cast(model: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    """Return floating-point inputs in the type of the model's first tensor."""
    (inputs,) = given
    kind = next(model.parameters()).dtype
    return (inputs.to(kind) if inputs.is_floating_point() else inputs,)


def own_name(name: str, classifier: str) -> str:
    """Return the name in a user's network of the tensor ``name`` of its WrappedModel."""
    part, _, rest = name.partition(".")
    return f"{classifier}.{rest}" if part == HEAD and classifier else rest


def last_layer(network: nn.Module) -> str:
    """Return the path of the last linear layer, or else of the last convolution."""
    for kind in _LAST:
        paths: list[str] = [path for path, one in network.named_modules() if isinstance(one, kind)]
        if paths:
            return paths[-1]
    raise ConfigError(
        f"the model {type(network).__name__} has no linear layer or convolution to use as its "
        "classifier: name the module that makes its outputs (task.classifier)"
    )


class _Place(nn.Module):
    """Stands where the classifier was."""

    def __init__(self, owner: WrappedModel) -> None:
        super().__init__()
        self._owner = (owner,)  # a tuple hides it from the submodules

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the classifier, such as ``weight``, for models that read it."""
        if name.startswith("_"):
            return super().__getattr__(name)
        return getattr(self._owner[0].head, name)

    def forward(self, features: Tensor) -> Tensor:
        """Return the classifier's outputs."""
        return self._owner[0].classify(features)


def _module(network: nn.Module, path: str) -> nn.Module:
    modules = dict(network.named_modules(remove_duplicate=False))
    if path not in modules:
        known = ", ".join(name for name in modules if name)
        raise ConfigError(f"task.classifier={path} is not a module of the model; it has: {known}")
    found: nn.Module = modules[path]
    names = [name for name, one in modules.items() if one is found]
    if len(names) > 1:
        raise ConfigError(
            f"task.classifier={path} has the names {', '.join(names)}, but its tensors need "
            "one name: choose another module"
        )
    return found


def _refuse_lazy(network: nn.Module) -> None:
    """Reject layers that get their sizes and weights from a first batch."""
    lazy = [
        f"{path} ({type(module).__name__})"
        for path, module in network.named_modules()
        if any(map(is_lazy, (*module._parameters.values(), *module._buffers.values())))
    ]
    if lazy:
        raise ConfigError(
            f"the model's lazy layers have no size yet: {', '.join(lazy)}. Give them their number "
            "of inputs, or call the model once on a batch of zeros in the model function, which "
            "is told input_shape if it has such a parameter"
        )


def _refuse_tied(body: nn.Module, head: nn.Module, path: str) -> None:
    """Reject a head that shares tensors with the body, because methods treat them separately."""
    own = {id(tensor) for tensor in head.parameters()}
    tied = [name for name, tensor in body.named_parameters() if id(tensor) in own]
    if tied:
        raise ConfigError(
            f"the classifier {path} shares its tensors with {', '.join(tied)}, but methods treat "
            "classifier and body separately: untie them (in a Hugging Face model "
            "tie_word_embeddings=false), or name another module in task.classifier and set "
            "task.num_classes"
        )


def _put(network: nn.Module, path: str, place: nn.Module) -> nn.Module:
    if not path:  # the network is its classifier, as in logistic regression
        return place
    parent, _, name = path.rpartition(".")
    network.get_submodule(parent)._modules[name] = place
    return network


def _drop_bias(head: nn.Module, path: str) -> None:
    if head._parameters.get("bias") is None:
        return
    head._parameters["bias"] = None
    getLogger("flwr").log(INFO, "task.head_bias=false: the bias of %s is removed", path)


def _hide_frozen(network: nn.Module) -> None:
    """Turn parameters that are not trained into plain attributes."""
    for module in network.modules():
        frozen = [n for n, p in module._parameters.items() if p is not None and not p.requires_grad]
        for name in frozen:
            value = module._parameters.pop(name)
            assert value is not None
            module.__dict__[name] = value.data
        if frozen:
            module.__dict__[FROZEN] = frozen


def _tensor(outputs: Any) -> Tensor:
    """Return a network's outputs; for Hugging Face's models the logits."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else outputs
    if found is None or isinstance(found, (tuple, list)):  # torch.fx traces with no tensor
        raise ConfigError(
            f"the model returned a {type(outputs).__name__}: it must return a tensor, the logits"
        )
    tensor: Tensor = found
    return tensor
