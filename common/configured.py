"""Configured: a class whose parameters are its annotated fields, checked where they are given.

    class FedProx(Method):
        mu: NotNegative = 0.1
        \"\"\"weight of the term; 0 is FedAvg\"\"\"

``FedProx(mu=1.0)`` sets ``self.mu``. The type, the range (kinds.py), the default and the meaning of
a parameter stand there and nowhere else: pydantic checks the values, and help, schema and pages are
made from the fields.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from fedhet.common.errors import ConfigError, did_you_mean
from fedhet.common.kinds import Section, choices_of, in_words


@dataclass(frozen=True)
class Key:
    """Marks a field that is a key of the recipe outside the method's own, such as ``seed``."""

    name: str


@dataclass(frozen=True)
class Refers:
    """Marks a field whose default in a recipe is a reference, such as ``${clients}``."""

    to: str


@dataclass(frozen=True)
class InCode:
    """Marks a field that only code can set: no recipe has it, and nothing checks it."""


@dataclass(frozen=True)
class Field:
    """A parameter of a class."""

    name: str
    annotation: Any  # without the marks
    default: Any  # MISSING: it must be given
    key: str | None = None  # of the recipe, outside the method's own
    refers: str | None = None  # what a recipe has for the default
    in_code: bool = False  # no recipe has it

    @property
    def allowed(self) -> str:
        """What it may be, in words."""
        return in_words(self.annotation)


class _Missing:
    """No default."""


MISSING = _Missing()


@dataclass_transform(kw_only_default=True, eq_default=False)
class Configured:
    """A class whose annotated attributes are its parameters; all are named where they are given.

    Attributes:
        section: the node of the recipe that has its parameters, which errors name.
        given: the parameters that were named; the others have their defaults.

    Raises:
        ConfigError: that names the key, the value and what is allowed.
    """

    section: ClassVar[str] = ""

    def __init__(self, **given: Any) -> None:
        vars(self).update(checked(type(self), given))
        self.given = tuple(given)
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that do not fit each other, by a ConfigError; nothing by default."""

    def __repr__(self) -> str:
        """Return the call that makes it."""
        known = fields(type(self)).values()
        values = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in known if not f.in_code)
        return f"{type(self).__name__}({values})"


class Option(Configured):
    """A class that an option of a config group builds: ``fedhet GROUP=OPTION``.

    Attributes:
        group: such as strategy/aggregator.
        option: its name there; a class without one is a base of others.
        variants: replaces ``option`` if several options build the class: by name, the values that
            each has in place of the class's defaults.
    """

    group: ClassVar[str] = ""
    option: ClassVar[str] = ""
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})

    def __init_subclass__(cls) -> None:
        """Name the node of the recipe as the group."""
        super().__init_subclass__()
        if "group" in vars(cls) and "section" not in vars(cls):
            cls.section = cls.group.replace("/", ".")


def fields(kind: type[Configured]) -> Mapping[str, Field]:
    """Return a class's parameters by name, those of the classes that it extends first."""
    any_kind: Any = kind  # to mypy, no class of this kind can be hashed
    return _fields(any_kind)


@cache
def _fields(kind: type[Configured]) -> Mapping[str, Field]:
    found: dict[str, Field] = {}
    hints = get_type_hints(kind, include_extras=True)
    for base in reversed(kind.__mro__):
        if not issubclass(base, Configured):
            continue  # another class's attributes are its own
        for name in vars(base).get("__annotations__", {}):
            if not name.startswith("_") and get_origin(hints[name]) is not ClassVar:
                found[name] = _field(name, hints[name], getattr(kind, name, MISSING))
    return found


def _field(name: str, hint: Any, default: Any) -> Field:
    inner, *metadata = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    key, refers, in_code, rest = None, None, False, []
    for one in metadata:
        match one:
            case Key():
                key = one.name
            case Refers():
                refers = one.to
            case InCode():
                in_code = True
            case _:
                rest.append(one)
    hint = Annotated[(inner, *rest)] if rest else inner
    return Field(name, hint, default, key, refers, in_code)


def signature_of(kind: type[Configured]) -> inspect.Signature:
    """Return the signature of a function that takes a class's parameters, by name.

    One that must be given has the default None, so that the class itself says what it lacks.
    """
    known = {name: f.default for name, f in fields(kind).items()}
    usual = {name: None if default is MISSING else default for name, default in known.items()}
    by_name = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, by_name, default=default) for name, default in usual.items()]
    )


def section_of(field: Field) -> type[Configured] | None:
    """Return the class of a field that is a section with its own parameters."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Configured) else None


@cache
def _model(kind: type[Configured]) -> type[BaseModel]:
    """Return the pydantic model that checks a class's parameters."""
    config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True
    )
    wanted: dict[str, Any] = {
        name: (
            Any if one.in_code else one.annotation,
            ... if one.default is MISSING else one.default,
        )
        for name, one in fields(kind).items()
    }
    return create_model(kind.__name__, __config__=config, **wanted)


def checked(kind: type[Configured], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all parameters of a class, checked."""
    known = fields(kind)
    values = {name: _plain(known.get(name), value) for name, value in given.items()}
    any_kind: Any = kind
    try:
        found = _model(any_kind).model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(dict.fromkeys(_lines(kind, error, values)))) from None
    return {name: getattr(found, name) for name in known}


def _plain(field: Field | None, value: Any) -> Any:
    """Return a value as the model takes it: a section from its mapping, NumPy's numbers as ours."""
    if field is not None and (kind := section_of(field)) and isinstance(value, Mapping):
        default = field.default  # the mapping says what changes of it
        return kind(**{name: getattr(default, name) for name in default.given} | dict(value))
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "item") else value


def _lines(
    kind: type[Configured], error: ValidationError, values: Mapping[str, Any]
) -> Iterator[str]:
    known = fields(kind)
    for one in error.errors(include_url=False, include_context=False):
        name = str(one["loc"][0]) if one["loc"] else ""
        if name not in known:
            own = [each for each in known if not (known[each].key or known[each].in_code)]
            yield (
                f"unknown key {_key(kind, name)}{did_you_mean(name, own)}; {kind.__name__} has: "
                f"{', '.join(own) or 'none'}"
            )
            continue
        field = known[name]
        key = field.key or _key(kind, name)
        if one["type"] == "missing":
            yield f"{key} is not set: it must be {field.allowed}"
        else:
            yield refusal(key, values.get(name), field.annotation)


Node = TypeVar("Node", bound=Section)


def checked_section(kind: type[Node], group: str, values: Mapping[str, Any]) -> Node:
    """Return a node of the recipe from plain values; a ConfigError names each wrong key."""
    lists = {key: list(one) if isinstance(one, tuple) else one for key, one in values.items()}
    try:
        return kind.model_validate(lists)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False)
        lines = [_line(kind, group, str(one["loc"][0]), one["type"], lists) for one in found]
        raise ConfigError("; ".join(dict.fromkeys(lines))) from None


def _line(kind: type[Section], group: str, name: str, why: str, values: Mapping[str, Any]) -> str:
    field = kind.model_fields.get(name)
    if field is None:
        known = ", ".join(kind.model_fields)
        return f"unknown key {group}.{name}{did_you_mean(name, kind.model_fields)}; it has: {known}"
    if why == "missing":
        return f"{group}.{name} is not set: it must be {in_words(field.annotation, field.metadata)}"
    return refusal(f"{group}.{name}", values.get(name), field.annotation, field.metadata)


def refusal(key: str, value: Any, annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return what is wrong with a value, and what is allowed."""
    if choices := choices_of(annotation):
        near = did_you_mean(str(value), choices)
        return f"{key}={shown(value)} is unknown{near}; allowed: {', '.join(choices)}"
    return f"{key}={shown(value)} is not allowed: it must be {in_words(annotation, metadata)}"


def _key(kind: type[Configured], name: str) -> str:
    return f"{kind.section}.{name}" if kind.section else name


def shown(value: Any) -> str:
    """Return a value as the command line has it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{shown(one)}' for key, one in value.items())}}}"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
