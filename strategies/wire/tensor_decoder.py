"""Tensors that a site sends, checked and decoded: part of the border (wire/border.py)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedhet.common.run_events import EVENT_MARK
from fedhet.strategies.base import RefusedReplyError, Tensors
from fedhet.strategies.wire.array_codec import to_tensor
from fedhet.strategies.wire.records import NonFiniteReplyError

_DIMS = 2  # of a payload whose shape no server side declares
_TEXT = 300  # characters of a site's text that are shown


def printable(text: object) -> str:
    """Return a site's text on one line, cut, with control characters escaped.

    So it cannot pass for an event of the run (common/run_events.py), a line of the same log.
    """
    text = str(text).replace(EVENT_MARK, EVENT_MARK.replace("-", " "))
    shown = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text)[:_TEXT])
    return shown + ("..." if len(str(text)) > _TEXT else "")


def decode_tensors(
    what: str,
    record: ArrayRecord | None,
    shapes: Mapping[str, tuple[int | None, ...]] | None,
    dtypes: Collection[torch.dtype],
    widest: int = 0,
    largest: float = math.inf,
) -> dict[str, Tensor]:
    """Return a record's tensors.

    Args:
        what: its name, for errors.
        record: None if the reply lacks it.
        shapes: by name; None stands for any length up to ``widest``. Without ``shapes`` the names
            are free, and every length is up to ``widest``.
        dtypes: the allowed ones.
        widest: the longest that an open dimension may be.
        largest: that the size of a number may be; see :func:`largest_of`.

    Raises:
        RefusedReplyError: says why; a NonFiniteReplyError for NaN and Inf, and beyond ``largest``.
    """
    record = check_names(what, record, None if shapes is None else shapes.keys())
    found = {
        name: decode_tensor(
            label_of(what, name), array, None if shapes is None else shapes[name], dtypes, widest
        )
        for name, array in record.items()
    }
    check_finite(what, found, largest)
    return found


def check_names(
    what: str, record: ArrayRecord | None, names: Collection[str] | None
) -> ArrayRecord:
    """Return the record; refuse one that is missing, or whose tensors have other names."""
    if record is None:
        raise RefusedReplyError(f"it lacks the payload {printable(what)!r}")
    if names is not None and record.keys() != set(names):
        lacks = sorted(set(names) - record.keys())
        unknown = sorted(printable(name) for name in record.keys() - set(names))
        raise RefusedReplyError(
            f"{what} lacks the tensors {lacks} and has unknown ones {unknown[:5]}"
        )
    return record


def decode_tensor(
    label: str,
    array: Array,
    shape: tuple[int | None, ...] | None,
    dtypes: Collection[torch.dtype],
    widest: int = 0,
) -> Tensor:
    """Return an array's tensor; refuse another type or shape (see :func:`check_shape`)."""
    try:
        value = to_tensor(array)
    except ValueError as error:
        raise RefusedReplyError(f"{label} cannot be read: {printable(error)}") from None
    if value.dtype not in dtypes:
        allowed = ", ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))
        kind = str(value.dtype).removeprefix("torch.")
        raise RefusedReplyError(f"{label} has the type {kind}, not {allowed}")
    if value.shape != shape:
        check_shape(label, tuple(value.shape), shape, widest)
    return value


@lru_cache(maxsize=4096)  # for every tensor of every reply
def label_of(what: str, name: str) -> str:
    """Return how errors name a tensor of a record."""
    return f"{what} {printable(name)!r}"


def check_shape(
    label: str, shape: tuple[int, ...], expected: tuple[int | None, ...] | None, widest: int
) -> None:
    """Refuse another shape; None stands for any length up to ``widest``, or for any such shape."""
    if expected is None and len(shape) > _DIMS:
        raise RefusedReplyError(
            f"{label} has shape {shape}: without a shape in ServerSide.expected a payload has at "
            f"most {_DIMS} dimensions"
        )
    expected = (None,) * len(shape) if expected is None else expected
    fits = len(shape) == len(expected) and all(
        length == wanted or (wanted is None and length <= widest)
        for length, wanted in zip(shape, expected, strict=True)
    )
    if not fits:
        wanted = tuple(f"<={widest}" if one is None else one for one in expected)
        raise RefusedReplyError(f"{label} has shape {shape}, expected {wanted}")


def check_finite(what: str, tensors: Tensors, largest: float = math.inf) -> None:
    """Refuse NaN and Inf, and numbers beyond +-``largest``."""
    for name, value in tensors.items():
        if not value.is_floating_point() or value.numel() == 0:
            continue
        if value.is_contiguous(memory_format=torch.channels_last):
            value = value.permute(0, 2, 3, 1)  # aminmax would copy it
        low, high = (float(end) for end in value.aminmax())  # NaN if there is one
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFiniteReplyError(f"{label_of(what, name)} holds NaN or Inf")
        if max(-low, high) > largest:
            raise NonFiniteReplyError(
                f"{label_of(what, name)} holds {high if high > -low else low:.3g}: numbers up to "
                f"{largest:.3g} can be added up"
            )
