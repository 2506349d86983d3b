"""Sums of tensors whose bits do not depend on the order of the summands: fixed point in integers.

A summand w v becomes a whole number of units u, which adds up exactly:

    k_i = round(w_i v_i / u),   sum_i w_i v_i = u sum_i k_i

So the order of the clients, the number of partial sums and who else was asked make no difference.
In a coarse sum u is 2^-45: float32 numbers whose product with their weight is 2^-22 or more are
added without rounding, and others to within 2^-46. That is for updates, which move parameters of
float32. In a fine sum u is 2^-57: payloads may be small throughout, such as squares of gradients.

A 64-bit integer (low) holds the sum as long as the numbers of a block are below 2^51 units, which
is 64 in a coarse sum. For larger ones there is a second number, of multiples of 2^51 units (high).
Together they hold sums up to 2^46; :func:`largest_summand` is the limit for each summand.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.strategies.base import Tensors

MOST_SUMMANDS = 1 << 18
COARSE, FINE = 2.0**-45, 2.0**-57  # units
_BITS = 51
_SPLIT = 2.0**_BITS  # units
# Added to a float64 below 2^51, 1.5 2^52 rounds it to a whole number k and leaves k in its last
# bits: read as an integer, the sum is a constant plus k. Converting numbers one by one takes
# longer. The constants are taken off at the end, modulo 2^64. The second rounds to multiples of
# 2^51 alike.
_TO_WHOLE, _TO_SPLIT = 1.5 * 2.0**52, 1.5 * 2.0**52 * _SPLIT
_WHOLE = torch.tensor(_TO_WHOLE, dtype=torch.float64)
_WHOLE_BITS = int(np.float64(_TO_WHOLE).view(np.int64))
_MOST = 2.0**62  # units that ``low`` may hold
_LARGEST = 2.0**46
_SMALL = 1 << 16  # a tensor of fewer numbers is added with others
_BLOCK = 1 << 18  # numbers at once
_SERIAL = 1 << 12  # numbers that float32 sums well, and torch on one thread
_THREADS = 2  # that read a large sum

Empty = Callable[[int], NDArray[np.int64]]


def largest_summand(weights: float) -> float:
    """Return the size of number that can be added up with weights of that sum at most."""
    return _LARGEST / max(weights, 1.0)


def plain_empty(numbers: int) -> NDArray[np.int64]:
    """Return room for so many numbers in this process's memory."""
    return np.empty(numbers, dtype=np.int64)


class ExactSum:
    """A sum of named tensors; the first summand decides names, shapes and types.

    ``unit`` is the resolution, FINE for doubles. ``empty`` allocates room for so many int64
    numbers, perhaps where another process reads them.
    """

    def __init__(self, unit: float = FINE, empty: Empty = plain_empty) -> None:
        self._unit, self._empty = unit, empty
        self._like: dict[str, tuple[torch.Size, torch.dtype]] = {}  # by name
        self._order: list[str] = []  # of the names in ``_low``: small tensors are added as one
        self._low: list[NDArray[np.int64]] = []  # parts of the sum, with the constants
        self._high: list[NDArray[np.float64]] = []  # parts, multiples of _SPLIT; few have some
        self._own = False  # whether the first part is this sum's; others are borrowed
        self._summands = 0  # how often the constant is in ``_low``
        self._bound = 0.0  # units that no number of ``_low`` exceeds, without the constants

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the allocator, which belongs to this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_empty"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore :meth:`__getstate__`."""
        self.__dict__ = {**state, "_empty": plain_empty, "_own": False}  # Ray's is read-only

    def add(self, tensors: Tensors, weight: float = 1.0) -> dict[str, float]:
        """Add ``weight`` times the tensors; return their norms, taken in the order of the sum."""
        if not tensors:
            return {}
        if not self._like:
            self._begin(tensors)
        self._make_room(_SPLIT)
        self.keep()
        flat = {name: _wide(_flat(tensors[name]).cpu()) for name in self._order}
        large = {name: value for name, value in flat.items() if len(value) >= _SMALL}
        small = {name: value for name, value in flat.items() if name not in large}
        norms, at, largest = norms_of(small), 0, 0.0
        joined = [torch.cat(list(small.values()))] if small else []
        squares = []
        for value in (*joined, *large.values()):
            square, scale = 0.0, float(torch.tensor(weight, dtype=value.dtype)) / self._unit
            for block in torch.split(value, _BLOCK):
                lengths = _lengths(block)
                square = sum(lengths.double().square().tolist(), square)
                longest = scale * float(lengths.max())
                largest = max(largest, self._add_block(block, scale, longest, at))
                at += len(block)
            squares.append(square)
        self._summands += 1
        self._bound += largest
        norms |= {n: one**0.5 for n, one in zip(large, squares[len(joined) :], strict=True)}
        return {name: norms[name] for name in tensors}

    def merge(self, other: Self, *, borrow: bool = False) -> None:
        """Add another part of the same sum.

        ``borrow``: without a copy, so nobody writes to the other until this is read, or keeps it.
        """
        if not other._like:
            return
        if not self._like:
            self._like, self._order, self._unit = other._like, other._order, other._unit
        else:
            self._make_room(other._bound)
        self._low += other._low
        self._summands += other._summands
        self._bound += other._bound
        self._high += other._high
        if not borrow:
            self.keep()

    def keep(self) -> None:
        """Copy what is borrowed."""
        if len(self._low) > self._own:
            total = self._low[0] if self._own else self._low[0].copy()
            for part in self._low[1:]:
                total += part
            self._low, self._own = [total], True
            if self._high:
                self._high = [sum(self._high[1:], start=self._high[0].copy())]

    def over(self, divisor: float) -> dict[str, Tensor]:
        """Return the sum over ``divisor``, in the summands' types and C order."""
        sizes = [self._like[name][0].numel() for name in self._order]
        starts = itertools.accumulate(sizes, initial=0)
        value = partial(self._value, divisor)
        if sum(sizes) < _BLOCK:
            values = list(map(value, self._order, starts))
        else:  # between two rounds, a simulation's server has the machine for itself
            with ThreadPoolExecutor(_THREADS) as pool:
                values = list(pool.map(value, self._order, starts))
        found = dict(zip(self._order, values, strict=True))
        return {name: found[name] for name in self._like}

    def _begin(self, tensors: Tensors) -> None:
        self._like = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        if any(value.dtype == torch.float64 for value in tensors.values()):
            self._unit = FINE
        self._order = sorted(tensors, key=lambda name: tensors[name].numel() >= _SMALL)
        numbers = sum(value.numel() for value in tensors.values())
        self._low, self._own = [self._empty(numbers)], True

    def _make_room(self, units: float) -> None:
        """Let numbers of so many units be added to ``_low``."""
        if self._bound + units > _MOST:
            self.keep()
            carried = (self._low[0] - self._constant) >> _BITS
            self._low[0] -= carried << _BITS
            self._high = [sum(self._high, start=np.multiply(carried, _SPLIT))]
            self._bound = _SPLIT

    def _add_block(self, block: Tensor, scale: float, longest: float, at: int) -> float:
        """Add numbers of which none exceeds ``longest`` units; return what none in _low exceeds."""
        here, wide = slice(at, at + len(block)), block.to(torch.float64, copy=True)
        if longest < _SPLIT / 2:  # the half is for what float32 has rounded
            whole = torch.add(_WHOLE, wide, alpha=scale, out=wide).numpy()
        else:
            longest, whole = _SPLIT, wide.mul_(scale).numpy()
            if not self._high:
                self._high = [self._empty(len(self._low[0])).view(np.float64)]
                self._high[0][:] = 0.0
            high = whole + _TO_SPLIT
            high -= _TO_SPLIT
            whole -= high
            self._high[0][here] += high
            whole += _TO_WHOLE
        if self._summands:
            self._low[0][here] += whole.view(np.int64)
        else:
            self._low[0][here] = whole.view(np.int64)
        return longest

    def _value(self, divisor: float, name: str, start: int) -> Tensor:
        shape, dtype = self._like[name]
        end = start + shape.numel()
        value = np.empty(end - start, np.float32 if dtype == torch.float32 else np.float64)
        for at in range(start, end, _BLOCK):
            here = slice(at, min(at + _BLOCK, end))
            numbers = self._low[0][here] - self._constant
            for part in self._low[1:]:
                numbers += part[here]
            if not self._high:
                total = numbers.astype(np.float64)
            else:  # the same number, however it is divided between the two
                carried = (numbers + (1 << _BITS - 1)) >> _BITS
                total = sum((part[here] for part in self._high), start=np.multiply(carried, _SPLIT))
                total += numbers - (carried << _BITS)
            total /= divisor / self._unit
            value[at - start : here.stop - start] = total
        return _unflat(torch.from_numpy(value).to(dtype), shape)

    @property
    def _constant(self) -> np.int64:
        """What the constants have added up to, modulo 2^64."""
        return np.uint64(self._summands * _WHOLE_BITS % (1 << 64)).astype(np.int64)


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor's numbers in the order of sums: channels last, as our convolutions lie."""
    value = tensor.detach()
    return (value.permute(0, 2, 3, 1) if value.dim() == 4 else value).reshape(-1)


def _unflat(flat: Tensor, shape: torch.Size) -> Tensor:
    """Return a tensor in C order, the inverse of :func:`_flat`."""
    if len(shape) != 4:
        return flat.reshape(shape)
    outputs, inputs, height, width = shape
    return flat.view(outputs, height, width, inputs).permute(0, 3, 1, 2).contiguous()


def _wide(tensor: Tensor) -> Tensor:
    """Return float64 as it is, and all other types as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def norms_of(tensors: Tensors) -> dict[str, float]:
    """Return the L2 norm of each tensor, the same on any number of threads."""
    lengths = [_lengths(_wide(value.detach().reshape(-1))) for value in tensors.values()]
    squares = iter(torch.cat(lengths).double().square().tolist() if lengths else ())
    return {
        name: sum(itertools.islice(squares, len(one)), 0.0) ** 0.5
        for name, one in zip(tensors, lengths, strict=True)
    }


def _lengths(flat: Tensor) -> Tensor:
    """Return the norms of a vector's parts of _SERIAL numbers, and of the rest."""
    end = len(flat) // _SERIAL * _SERIAL
    rest: Tensor = torch.linalg.vector_norm(flat[end:]).reshape(1)
    if end == 0:
        return rest
    return torch.cat([torch.linalg.vector_norm(flat[:end].view(-1, _SERIAL), dim=1), rest])
