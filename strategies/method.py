"""Method: a Flower strategy that is one paper's method, and the only definition of it.

    class FedProx(Method):
        mu: NotNegative = 0.1
        \"\"\"weight of the term; 0 is FedAvg\"\"\"

        def parts(self) -> Parts:
            return Parts(client_sides={"fedprox": FedProxClient(self.mu)})

``FedProx(mu=1.0)`` in a Flower app and ``fedhet strategy=fedprox strategy.fedprox.mu=1`` build this
class. A field whose type is a :class:`MethodPart` is a separate node (``strategy.soft_labels``),
shared by all methods that have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from fedhet.common.configured import Configured, InCode, Key, fields, section_of
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Positive
from fedhet.strategies.components.server_optimizers import SGD
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.parts import SLOTS, Parts, Setup

Settings = Mapping[str, Any]
_NONE: Settings = MappingProxyType({})
OWN_MODELS: Settings = MappingProxyType({"evaluation.model": "clients"})
# One round of long local training, as in MA-Echo's comparison.
ONE_SHOT: Settings = MappingProxyType(
    {
        "rounds": 1,
        "local.epochs": 10,
        "local.batch_size": 64,
        "local.lr": 0.01,
        "local.momentum": 0.5,
    }
)


class MethodPart(Configured):
    """Parameters, and the parts made from them.

    Attributes:
        name: its node of the recipe is ``strategy.NAME``.
        settings: new defaults of other keys or groups of the recipe; a user may change them.
        requires: keys of the recipe, and the only value that each may have.
    """

    name: ClassVar[str] = ""
    settings: ClassVar[Settings] = _NONE
    requires: ClassVar[Settings] = _NONE

    def __init_subclass__(cls) -> None:
        """Name the class's node of the recipe."""
        super().__init_subclass__()
        cls.section = f"strategy.{cls.name}"

    def parts(self) -> Parts:
        """Return the parts that it adds, and those that it replaces."""
        return Parts()

    def shared(self) -> Iterator[MethodPart]:
        """Yield the parts of the method that others share."""
        for name, field in fields(type(self)).items():
            kind = section_of(field)
            if kind is not None and issubclass(kind, MethodPart):
                yield getattr(self, name)

    def all_parts(self) -> Parts:
        """Return the parts, with those of the shared ones; its own slots count."""
        return reduce(or_, [*(one.all_parts() for one in self.shared()), self.parts()])


class Method(MethodPart, FederatedStrategy):
    """A method of one paper; FedAvg without fields and parts.

    Attributes:
        replaces: the slots that the method needs for itself: only one of several combined methods
            may replace a slot. "loss" is the task's loss, in which two would not add up.
        server_lr: eta_g: x <- x + eta_g * Delta.
        options: parts that take the place of the method's, such as another aggregator.
        setup: of the run.
    """

    replaces: ClassVar[frozenset[str]] = frozenset()

    server_lr: Annotated[Positive, Key("server.lr")] = 1.0
    options: Annotated[Parts, InCode()] = Parts()
    setup: Annotated[Setup, InCode()] = Setup()

    def __init_subclass__(cls) -> None:
        """Name the method as its class."""
        cls.name = vars(cls).get("name", cls.__name__.lower())
        super().__init_subclass__()

    def __init__(self, **given: Any) -> None:
        Configured.__init__(self, **given)
        for slot in SLOTS:
            own = self.requires.get(f"strategy.{slot}", "any") is None
            if own and getattr(self.options, slot) is not None:
                raise ConfigError(
                    f"strategy={self.name} needs its own {slot}: give none in options"
                )
        parts = _stepping(self, self.all_parts() | self.options)
        FederatedStrategy.__init__(self, parts, self.setup)

    @classmethod
    def unbound(cls, values: Mapping[str, Any]) -> Self:
        """Return the method with these parameters, only for its parts: it runs no round."""
        made = cls.__new__(cls)
        Configured.__init__(made, **values)
        return made


def combined(methods: Sequence[Method], options: Parts, setup: Setup) -> FederatedStrategy:
    """Return the strategy of several methods together, whose class has all their names.

    Raises:
        ConfigError: if two of them replace a slot.
    """
    kinds = sorted((type(one) for one in methods), key=lambda kind: kind.name)
    names = [kind.__name__ for kind in kinds]
    made = type("_".join(names), (FederatedStrategy,), {"__doc__": f"{' and '.join(names)}."})
    parts = _stepping(methods[0], parts_together(methods) | options)
    found: FederatedStrategy = made(parts, setup)
    return found


def _stepping(method: Method, parts: Parts) -> Parts:
    """Return the parts with FedAvg's server optimizer, of the method's step size, if none is in."""
    return Parts(server_optimizer=SGD(lr=method.server_lr)) | parts


def parts_together(methods: Sequence[Method]) -> Parts:
    """Return the parts of several methods; a slot comes from the method that replaces it.

    Raises:
        ConfigError: if two of them fill a slot, and neither or both replace it.
    """
    methods = sorted(methods, key=lambda one: one.name)
    every = {one.name: one.all_parts() for one in methods}
    slots = {slot: _filled(slot, methods, every) for slot in SLOTS}
    return replace(reduce(or_, every.values()), **slots)


def _filled(slot: str, methods: Sequence[Method], every: Mapping[str, Parts]) -> Any:
    filling = {one: getattr(every[one.name], slot) for one in methods}
    filling = {one: part for one, part in filling.items() if part is not None}
    owning = {one: part for one, part in filling.items() if slot in one.replaces}
    found = owning or filling
    if len({type(part) for part in found.values()}) > 1:
        names = [one.name for one in found]
        raise ConfigError(
            f"strategy=[{','.join(names)}]: both replace the {slot}, and there is one: drop one of "
            "them"
        )
    return next(iter(found.values()), None)
