"""Builds a recipe's strategy: its methods by their classes, and the parts chosen in their place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, flag_override
from torch import nn

from fedhet.common.configured import Configured, fields, section_of
from fedhet.conf import build_part, model_known
from fedhet.conf.catalogue import load
from fedhet.strategies.components.tensor_selection import name_norm_layers
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.method import Method, combined, parts_together
from fedhet.strategies.parts import Parts, Setup

_SELECTORS = ("personal", "layers", "momentum_layers", "cka")
# The groups strategy/NAME that fill a slot; null: the method's own part.
_OPTIONS = (
    "aggregator",
    "server_optimizer",
    "output",
    "sampler",
    "compression",
    "secure_aggregation",
)


def strategy_of(recipe: DictConfig, classifier_tensors: int, setup: Setup) -> FederatedStrategy:
    """Return the recipe's strategy: an object of the method's class, or of the combination's."""
    methods = method_values(recipe, classifier_tensors)
    options = option_parts(recipe, classifier_tensors)
    if len(methods) == 1:
        ((kind, values),) = methods.items()
        return kind(**values, options=options, setup=setup)
    return combined([kind.unbound(values) for kind, values in methods.items()], options, setup)


def with_norm_layers(recipe: DictConfig, model: nn.Module) -> DictConfig:
    """Return the recipe with the model's tensors in place of ``norm`` in its selectors."""
    plain: Any = OmegaConf.to_container(recipe, resolve=False)
    named = {
        key: name_norm_layers(text, model, key)
        for section in ("strategy", "local", "diagnostics", "initial_model")
        for key, text in _selectors(plain.get(section), section)
    }
    changed = {key: text for key, text in named.items() if text != OmegaConf.select(recipe, key)}
    if not changed:
        return recipe
    recipe = copy.deepcopy(recipe)
    with flag_override(recipe, "readonly", False):
        for key, text in changed.items():
            OmegaConf.update(recipe, key, text, merge=False)
    return recipe


def _selectors(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the keys of selectors below a node, and their texts."""
    if isinstance(node, str):
        if path.rpartition(".")[2] in _SELECTORS and "${" not in node:
            yield path, node
    elif isinstance(node, Mapping):
        for name, value in node.items():
            yield from _selectors(value, f"{path}.{name}")
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _selectors(value, f"{path}[{number}]")


def strategy_parts(recipe: DictConfig, classifier_tensors: int) -> Parts:
    """Return the parts of the recipe's strategy alone, as clients and checks need them."""
    methods = method_values(recipe, classifier_tensors)
    own = parts_together([kind.unbound(values) for kind, values in methods.items()])
    return own | option_parts(recipe, classifier_tensors)


def option_parts(recipe: DictConfig, classifier_tensors: int) -> Parts:
    """Return the parts that a recipe chooses in the place of the method's, and privacy's halves."""
    built = {key: build_part(recipe, f"strategy.{key}", classifier_tensors) for key in _OPTIONS}
    parts = Parts(**built)
    privacy = build_part(recipe, "strategy.differential_privacy", classifier_tensors)
    if privacy is None:
        return parts
    client, server = privacy.halves(parts.sampler)
    name = "differential_privacy"
    return Parts(client_sides={name: client}, server_sides={name: server}) | parts


def method_values(
    recipe: DictConfig, classifier_tensors: int
) -> Mapping[type[Method], dict[str, Any]]:
    """Return the classes of the recipe's methods, each with its parameters.

    ``classifier_tensors``, how many of the model's last tensors are its classifier, is what recipes
    refer to as ``${task.classifier_tensors}``.
    """
    with model_known(recipe, classifier_tensors):
        kinds = [load(str(path)) for path in recipe.strategy.methods.values()]
        return {kind: _values(recipe, kind) for kind in kinds}


def _values(recipe: DictConfig, kind: type[Configured]) -> dict[str, Any]:
    """Return a class's parameters, as the recipe has them."""
    node = OmegaConf.select(recipe, kind.section)
    values: dict[str, Any] = {} if node is None else _plain(node)
    for name, field in fields(kind).items():
        section = section_of(field)
        if field.key:
            values[name] = OmegaConf.select(recipe, field.key)
        elif section is not None:
            values[name] = _values(recipe, section)
    return values


def _plain(node: DictConfig) -> dict[str, Any]:
    plain: Any = OmegaConf.to_container(node, resolve=True)
    return dict(plain)
