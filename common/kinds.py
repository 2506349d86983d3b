"""The types of a recipe's values, and how each is put into words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo


@dataclass(frozen=True)
class Says:
    """What is allowed, for errors, `--help` and the docs, if the type alone does not say it."""

    text: str


class Section(BaseModel):
    """A node of the recipe whose keys are all known, each with its type and meaning."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        protected_namespaces=(),
        allow_inf_nan=False,
        defer_build=True,  # one validator, of the whole recipe
    )


class Part(Section):
    """A node that Hydra builds: a class and its arguments, which its constructor checks."""

    model_config = ConfigDict(extra="allow")

    target: str = Field(alias="_target_", description="class that is built from this node")


def _selector(text: str) -> str:
    kind, _, count = text.partition(":")
    if not text or (kind in ("last", "first") and not (count.isdigit() and int(count) > 0)):
        raise ValueError
    return text


def is_address(text: str) -> bool:
    """Return whether a text is host:port, with an IPv6 host in brackets."""
    found = re.fullmatch(r"(?:[^][:/@\s]+|\[[0-9A-Fa-f:.]+\]):([0-9]+)", text, re.ASCII)
    return found is not None and 0 < int(found[1]) < 2**16


def _address(text: str) -> str:
    if not is_address(text):
        raise ValueError
    return text


def _fetch_command(text: str) -> str:
    text.format(server="", here="")  # another {name}: KeyError
    shlex.split(text)  # an unclosed quote: ValueError
    return text


def _format_error(text: str) -> str:
    try:
        return _fetch_command(text)
    except (KeyError, IndexError) as error:
        raise ValueError from error


MOST = 2**31 - 1  # the largest count in a message or a tensor's size
Whole = Annotated[int, Field(ge=0, le=MOST)]
Count = Annotated[int, Field(ge=1, le=MOST)]
Two = Annotated[int, Field(ge=2, le=MOST)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareAboveZero = Annotated[float, Field(gt=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]
Inside = Annotated[float, Field(gt=0, lt=1)]
Delta = Annotated[float, Field(ge=1e-10, le=0.1)]  # below, an accountant loses precision
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Text = Annotated[str, Field(min_length=1)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]  # a year: longer overflows a timer
Selector = Annotated[
    str, AfterValidator(_selector), Says("none, all, last:N, first:N or name patterns")
]
Device = Annotated[
    str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$"), Says("auto, cpu, cuda or cuda:N")
]
Address = Annotated[str, AfterValidator(_address), Says("host:port, without https://")]
Fetch = Annotated[
    str, AfterValidator(_format_error), Says("a command with {server} and {here} and no other {}")
]

# A function of the user's own: tasks/references.py loads it.
Reference = Annotated[
    str,
    Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.\w+)*$"),
    Says("package.module:function"),
]

_TYPES: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (in quotes if it looks like a number)",
    NoneType: "null",
    dict: "a mapping",
    Any: "anything",
}
_SHOWN = 4  # keys of a mapping
_SHORT = {"text (in quotes if it looks like a number)": "text"}


def in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return in words what a type allows, such as "a number in (0, 1] or null"."""
    bounds: dict[str, float] = {}
    for one in _flat(metadata):
        if isinstance(one, Says):
            return one.text
        bounds |= {n: getattr(one, n) for n in ("gt", "ge", "lt", "le") if hasattr(one, n)}
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *own = get_args(annotation)
        return in_words(inner, [*own, *metadata])
    if origin is Literal:
        return "one of " + ", ".join(str(value) for value in get_args(annotation))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(in_words(one) for one in get_args(annotation)))
    if origin in (list, tuple, Sequence):
        return f"a list, each of it {in_words(get_args(annotation)[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        keys = [field.alias or name for name, field in annotation.model_fields.items()]
        more = ", ..." if len(keys) > _SHOWN else ""
        return f"a mapping ({', '.join(keys[:_SHOWN])}{more})"
    kind = origin or annotation
    return (_TYPES.get(kind) or f"a {kind.__name__}") + _span(annotation, bounds)


def short_words(words: str) -> str:
    """Return what a value may be, in the words of a table."""
    for long, short in _SHORT.items():
        words = words.replace(long, short)
    return words.removeprefix("one of ").replace(" or one of ", " or ")


def choices_of(annotation: Any) -> list[str]:
    """Return the values of a type that is a choice, null included if it is one of them."""
    origin = get_origin(annotation)
    if origin is Literal:
        return [str(value) for value in get_args(annotation)]
    if origin in (Union, UnionType):
        options = [choices_of(one) for one in get_args(annotation) if one is not NoneType]
        null = ["null"] if NoneType in get_args(annotation) else []
        own = [in_words(one) for one in get_args(annotation) if one is Reference]
        found = [one for one in options if one]
        return [*found[0], *own, *null] if len(found) == 1 == len(options) - len(own) else []
    return []


def _flat(metadata: Iterable[Any]) -> Iterable[Any]:
    for one in metadata:
        yield from one.metadata if isinstance(one, FieldInfo) else (one,)


def _span(annotation: Any, bounds: Mapping[str, float]) -> str:
    if not bounds:
        return ""
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if annotation is int and high in (None, MOST):
        return f" of at least {low}"
    if high is None:
        return f" above {low:g}" if "gt" in bounds else f" of at least {low:g}"
    left, right = "(" if "gt" in bounds else "[", "]" if "le" in bounds else ")"
    return f" in {left}{low}, {high}{right}"
