"""All that is known of a method, from its recipe, its code, its tests and a measured round."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor, nn

from common.errors import ConfigError
from conf import FOLDER, check_slots
from docs.generator.checks import Test, checks_of, matrix_of
from docs.generator.measure import Cost, measure
from docs.generator.prose import first_sentence, url_after
from docs.generator.recipes import ROOT, Recipe, all_recipes
from strategies.base import ClientSide, ServerSide
from strategies.components.local_optimizers import SGD
from strategies.components.tensor_selection import TensorSelector, shared_names
from strategies.round.checks import check_sides
from strategies.round.federated import FederatedStrategy, Slots
from tasks.models import build_model

_NOTES = Path(__file__).parent / "notes"
_CLIENT_HOOKS = ("begin", "penalty", "correct", "end", "upload")
_SERVER_HOOKS = ("broadcast", "reduce")
_APART = "the one needs tensors at the server that the other keeps at the clients"


@dataclass(frozen=True)
class Part:
    """A class of a recipe.

    Attributes:
        role: what it is, such as "client half".
        name: of the class.
        path: of its file.
        says: the first paragraph of its docstring.
        hooks: which of its half's hooks it has.
        settings: what sets it apart where FedAvg has the same class, such as "(momentum=0.9)".
    """

    role: str
    name: str
    path: Path
    says: str
    hooks: Sequence[str] = ()
    settings: str = ""


@dataclass(frozen=True)
class Method:
    """A method's facts; ``base`` is FedAvg, which every recipe extends."""

    recipe: Recipe
    base: Recipe

    @cached_property
    def module(self) -> Path | None:
        """The method's own file, strategies/<method>.py, or else that of the slot it replaces."""
        own = ROOT / "strategies" / f"{self.recipe.method}.py"
        if own.exists():
            return own
        targets, slots = self.recipe.targets, self.recipe.slots
        places = {"optimizer": f"local.optimizers.{self.recipe.composed.local.optimizer}"}
        replaced = [targets[places.get(slot, f"strategy.{slot}")] for slot in slots]
        added = [target for key, target in targets.items() if "_sides." in key]
        return next((_file_of(target) for target in [*replaced, *added]), None)

    @cached_property
    def docstring(self) -> str:
        """The docstring of the method's file."""
        if self.module is None:
            return ""
        tree = ast.parse(self.module.read_text(encoding="utf-8"))
        return ast.get_docstring(tree) or ""

    @property
    def is_alone(self) -> bool:
        """Whether the method has a file of its own, whose docstring is about it alone."""
        return self.module is not None and self.module.stem == self.recipe.method

    @property
    def url(self) -> str:
        """The paper's address; empty if neither docstring nor recipe has one."""
        author = self.recipe.paper.split()[0].rstrip(",")
        found = url_after(self.docstring, author) or url_after(self.recipe.summary, "")
        return found or (url_after(self.docstring, "") if self.is_alone else "")

    @cached_property
    def cost(self) -> Cost:
        """What the recipe takes as it stands."""
        return measure(f"strategy={self.recipe.method}")

    @cached_property
    def variants(self) -> dict[str, Cost]:
        """What it takes with the options that the matrix of tests has, by their words."""
        found = {}
        for words in matrix_of(self.recipe.method):
            of_strategy = all(word.startswith("strategy") for word in words)
            if words[0] == f"strategy={self.recipe.method}" and len(words) > 1 and of_strategy:
                found[" ".join(words[1:])] = measure(*words)
        return found

    @cached_property
    def checks(self) -> list[Test]:
        """The tests that it is in."""
        return checks_of(self.recipe, self.base)

    @cached_property
    def notes(self) -> str:
        """What is written of it by hand, in Markdown."""
        path = _NOTES / f"{self.recipe.method}.md"
        return path.read_text(encoding="utf-8").strip() if path.exists() else ""

    @cached_property
    def parts(self) -> list[Part]:
        """The recipe's classes that are not FedAvg's, and of FedAvg all."""
        alone = self.recipe.method == self.base.method
        parts = []
        for key, target in self.recipe.targets.items():
            same = target == self.base.targets.get(key)
            if alone or not same or key.rpartition(".")[2] in self.recipe.slots:
                part = _part(_role(key), target)
                parts.append(replace(part, settings=self._settings(key)) if same else part)
        return parts

    def _settings(self, key: str) -> str:
        own = [option for option in self.recipe.options if option.key.startswith(f"{key}.")]
        values = [f"{option.key.rpartition('.')[2]}={option.default}" for option in own]
        return f"({', '.join(values)})" if values else ""

    @cached_property
    def strategy(self) -> type[FederatedStrategy] | None:
        """The method's Flower strategy, found by its name."""
        for path in sorted((ROOT / "strategies").glob("*.py")):
            module = importlib.import_module(f"strategies.{path.stem}")
            for name, value in vars(module).items():
                wanted = "".join(filter(str.isalnum, self.recipe.name)).lower()
                if name.lower() != wanted or not inspect.isclass(value):
                    continue
                if value.__module__ == module.__name__ and issubclass(value, FederatedStrategy):
                    return value
        return None

    @property
    def call(self) -> str:
        """How the strategy is made, with its own arguments and their defaults."""
        assert self.strategy is not None
        parameters = inspect.signature(self.strategy).parameters.values()
        own = [
            p.name if p.default is p.empty else f"{p.name}={p.default!r}"
            for p in parameters
            if p.kind is not p.VAR_KEYWORD and p.name not in Slots.__annotations__
        ]
        return f"{self.strategy.__name__}({', '.join(own)})"

    def clash_with(self, other: Method) -> str:
        """Return why the two cannot be combined; empty if they can."""
        slots = sorted(set(self.recipe.slots) & set(other.recipe.slots))
        methods = {**_methods(self.recipe), **_methods(other.recipe)}
        try:
            check_slots(OmegaConf.create({"strategy": {"methods": methods}}))
        except ValueError:
            return f"both replace the {_role(f'strategy.{slots[0]}')}"
        client, server = (
            {**mine, **theirs}
            for mine, theirs in zip(self.recipe.sides, other.recipe.sides, strict=True)
        )
        try:
            check_sides(client, server, allow_stacked=True)
        except ConfigError:
            return f"both send {_both_send(client, server)}"
        try:
            check_sides(client, server)
        except ConfigError:
            return "both correct the gradient; `strategy.allow_stacked_corrections=true` allows it"
        kept = [str(recipe.composed.strategy.personal) for recipe in (self.recipe, other.recipe)]
        try:
            for side in server.values():
                side.init(_shared(*sorted(kept)))
        except ConfigError:
            return _APART
        travelling = list(_shared(*sorted(kept)))
        every = list(_shared("none"))
        if any(_accepts(s, every) and not _accepts(s, travelling) for s in client.values()):
            return _APART
        return ""


def all_methods() -> list[Method]:
    """Return every recipe's method: FedAvg, then the others by name."""
    recipes = all_recipes()
    base = next(recipe for recipe in recipes if recipe.method == "fedavg")
    recipes.sort(key=lambda recipe: (recipe != base, recipe.name.lower()))
    return [Method(recipe, base) for recipe in recipes]


def experiments_with(method: str) -> dict[str, Path]:
    """Return the experiment files that name a method, by experiment."""
    folder = FOLDER / "experiment"
    word = re.compile(rf"(?<!\w){re.escape(method)}(?!\w)")
    return {
        path.relative_to(folder).with_suffix("").as_posix(): path
        for path in sorted(folder.rglob("*.yaml"))
        if path.parent.name == method or word.search(path.read_text(encoding="utf-8"))
    }


def results_with(name: str) -> list[Path]:
    """Return the pages of measured results that name a method."""
    paths = sorted((ROOT / "docs" / "results").glob("*.md"))
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    return [path for path in paths if word.search(path.read_text(encoding="utf-8"))]


@lru_cache
def _small_model() -> nn.Module:
    return build_model("mlp", input_shape=(1, 8, 8), num_classes=10, seed=0)


@lru_cache
def _shared(*personal: str) -> dict[str, Tensor]:
    """Return the trainable tensors of a small model that travel where these stay."""
    model = _small_model()
    travelling = [set(shared_names(model, TensorSelector(spec))) for spec in personal]
    return {n: p for n, p in model.named_parameters() if all(n in names for names in travelling)}


def _accepts(side: ClientSide, shared: Sequence[str]) -> bool:
    """Return whether a client half can work where these tensors of a small model travel."""
    try:
        side.check(_small_model(), SGD(), shared)
    except ConfigError:
        return False
    return True


def _methods(recipe: Recipe) -> Mapping[str, Any]:
    return {str(name): list(slots) for name, slots in recipe.composed.strategy.methods.items()}


def _both_send(*halves: Mapping[str, ClientSide] | Mapping[str, ServerSide]) -> str:
    sent = [name for sides in halves for side in sides.values() for name in side.sends]
    return " and ".join(f"`{name}`" for name in sorted({n for n in sent if sent.count(n) > 1}))


def _role(key: str) -> str:
    group = key.split(".")[1]
    names = {
        "client_sides": "client half",
        "server_sides": "server half",
        "transforms": "reply transform",
        "optimizers": "local optimizer",
        "server_optimizer": "server optimiser",
        "personal": "personal tensors",
        "optimizer": "local optimizer",
    }
    return names.get(group, group)


def _part(role: str, target: str) -> Part:
    module, _, name = target.rpartition(".")
    made = getattr(importlib.import_module(module), name)
    kinds = {"client half": (ClientSide, _CLIENT_HOOKS), "server half": (ServerSide, _SERVER_HOOKS)}
    plain, hooks = kinds.get(role, (object, ()))
    own = [hook for hook in hooks if getattr(made, hook) is not getattr(plain, hook)]
    return Part(role, name, _file_of(target), first_sentence(made.__doc__), own)


def _file_of(target: str) -> Path:
    return ROOT / (target.rpartition(".")[0].replace(".", "/") + ".py")
