"""Tensor selection by name: `all`, `last:2`, `head.*`, `not:head.*`; for partial methods and
personal parts.

`norm` stands for the normalisation layers, which are found by the types of the model's modules:
BatchNorm, InstanceNorm, GroupNorm, LayerNorm and others whose class is named so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError

_TRAVELLING = (torch.float16, torch.float32, torch.float64)
_SYNTAX = (
    "'all', 'none', 'last:N', 'first:N', 'norm', name patterns such as 'head.*,body.fc*', or all "
    "but those, 'not:head.*'"
)
NORM = "norm"
_NOT = "not:"
_NORMALISES = re.compile(r"Norm(?:[123]d)?$")  # ends of the names of classes


def linear_classifier(model: nn.Module, method_does: str) -> nn.Linear:
    """Return the model's classifier; refuse one that is not linear, or has one output.

    ``method_does`` begins the error, such as "FedDW ties the weight of".
    """
    head = dict(model.named_modules()).get("head")
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{method_does} the model's linear classifier, and the classifier is a "
            f"{type(head).__name__}: name a linear layer (task.classifier)"
        )
    require_output_by_class(model)
    return head


def require_output_by_class(model: nn.Module) -> None:
    """Refuse a classifier with one output for two classes, of methods that read a row by class."""
    head = dict(model.named_modules()).get("head")
    if isinstance(head, nn.Linear) and head.out_features == 1:
        raise ConfigError(
            "the method reads the classifier by class, and this one has one output for two "
            "classes: choose another strategy, or a task.model with an output for each class"
        )


@dataclass(frozen=True)
class TensorSelector:
    """Selects tensors out of the model's ``named_parameters()`` order."""

    # ``all``; ``none``; ``last:N`` or ``first:N`` tensors (weights and biases counted separately);
    # comma-separated shell patterns of names; or ``not:`` and patterns of those to leave out.
    # ``norm`` is for :meth:`on`
    spec: str
    key: str = field(default="strategy.personal", compare=False)  # of the recipe, for the errors

    def __post_init__(self) -> None:
        """Refuse a malformed count."""
        kind, _, count = self.spec.partition(":")
        if kind in ("last", "first") and not (count.isdigit() and int(count) > 0):
            raise ConfigError(f"{self.key}={self.spec!r} is not allowed: it must be {_SYNTAX}")

    def on(self, model: nn.Module) -> TensorSelector:
        """Return the selector with the model's tensors in place of ``norm``."""
        spec = name_norm_layers(self.spec, model, self.key)
        return self if spec == self.spec else TensorSelector(spec, self.key)

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the selected names in their order; a spec that fits none is a ConfigError."""
        if self.spec == "none":
            return []
        ordered = list(names)
        if self.spec == "all" and ordered:
            return ordered
        kind, _, count = self.spec.partition(":")
        if kind in ("last", "first"):
            chosen = self._by_count(ordered, kind, int(count))
        else:
            chosen = self.select_buffers(ordered)
        if not chosen:
            raise ConfigError(
                f"{self.key}={self.spec!r} selects none of the model's tensors {ordered}; "
                f"allowed: {_SYNTAX}. Change {self.key}"
            )
        return chosen

    def select_buffers(self, names: Iterable[str]) -> list[str]:
        """Return those of the buffers' names that ``all`` or a pattern selects."""
        spec, wanted = self.spec.removeprefix(_NOT), not self.spec.startswith(_NOT)
        patterns = ["*"] if spec == "all" else [part.strip() for part in spec.split(",")]
        return [n for n in names if any(fnmatchcase(n, p) for p in patterns) == wanted]

    def _by_count(self, ordered: list[str], kind: str, count: int) -> list[str]:
        if count > len(ordered):
            raise ConfigError(
                f"{self.key}={self.spec!r} asks for {count} of {len(ordered)} tensors {ordered}; "
                f"change {self.key}"
            )
        return ordered[-count:] if kind == "last" else ordered[:count]


def name_norm_layers(spec: str, model: nn.Module, key: str) -> str:
    """Return a selector's text with the names of the model's tensors in place of ``norm``.

    Raises:
        ConfigError: if the model has no normalisation layer.
    """
    parts = [part.strip() for part in spec.split(",")]
    if NORM not in parts:
        return spec
    names = norm_tensors(model)
    if not names:
        raise ConfigError(
            f"{key}={spec}: the model has no normalisation layer with tensors; choose a task.model "
            "with BatchNorm or GroupNorm (bn_cnn, resnet18_bn), or name tensors"
        )
    return ",".join(name for part in parts for name in (names if part == NORM else [part]))


def norm_tensors(model: nn.Module) -> list[str]:
    """Return the names of the normalisation layers' parameters, then of their float buffers."""
    known = [*(name for name, _ in model.named_parameters()), *float_buffers(model)]
    inside = tuple(
        f"{path}." if path else ""
        for path, module in model.named_modules()
        if _NORMALISES.search(type(module).__name__) and not any(module.children())
    )
    return [name for name in known if name.rpartition(".")[0] + "." in inside]


def trainable_shared(model: nn.Module, personal: TensorSelector) -> list[str]:
    """Return the names of the parameters that travel."""
    names = [name for name, _ in model.named_parameters()]
    kept = set(personal.on(model).select(names))
    return [name for name in names if name not in kept]


def shared_names(model: nn.Module, personal: TensorSelector) -> list[str]:
    """Return the names that travel: parameters, then floating-point buffers, less personal ones.

    Integer buffers (BatchNorm's batch counters) stay: their mean means nothing.

    Raises:
        ConfigError: if one has a type that numpy lacks, such as bfloat16.
    """
    kept = set(personal_names(model, personal))
    names = [name for name, _ in model.named_parameters()]
    shared = [name for name in [*names, *float_buffers(model)] if name not in kept]
    tensors = tensors_of(model)
    for name in shared:
        if tensors[name].dtype not in _TRAVELLING:
            raise ConfigError(
                f"{name} of the model is {tensors[name].dtype}, and what travels is float16, "
                "float32 or float64: load the model in float32 (local.autocast=true then computes "
                "in bfloat16)"
            )
    return shared


def personal_names(model: nn.Module, personal: TensorSelector) -> list[str]:
    """Return the names that stay at a client: parameters, then floating-point buffers."""
    personal = personal.on(model)
    kept = personal.select(name for name, _ in model.named_parameters())
    return kept + personal.select_buffers(float_buffers(model))


def fixed_names(model: nn.Module, personal: str, trained: Sequence[str]) -> list[str]:
    """Return the names that neither travel nor are trained: all have the seed's values.

    Args:
        model: of the run.
        personal: ``strategy.personal``.
        trained: ``layers`` of each of ``strategy.phases``; empty: all tensors are trained.
    """
    if not trained:
        return []
    names = [name for name, _ in model.named_parameters()]
    moved = {name for layers in trained for name in TensorSelector(layers).on(model).select(names)}
    return [n for n in personal_names(model, TensorSelector(personal)) if n not in moved]


def float_buffers(model: nn.Module) -> list[str]:
    """Return the names of the floating-point buffers that a model's state has (persistent ones)."""
    state = tensors_of(model)
    buffers = [name for name, _ in model.named_buffers() if name in state]
    return [name for name in buffers if state[name].is_floating_point()]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, sharing the model's memory.

    A tensor that is tied to others has the name that ``named_parameters`` gives it, and no other.
    """
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    return {name: value for name, value in model.state_dict().items() if name in names}
