"""Sums of tensors whose bits do not depend on the order of the summands: fixed point in integers.

A summand w v becomes two whole numbers, which add up exactly:

    high = round(w v 2^16),   low = round((w v 2^16 - high) 2^44)
    sum_i w_i v_i = 2^-16 sum_i high_i + 2^-60 sum_i low_i

So the order of the clients, the number of partial sums and who else was asked make no difference.
The resolution is 2^-60: float32 numbers from 2^-36 on are added without rounding. Two 64-bit
integers hold sums up to 2^46 of up to 2^18 clients; :func:`largest_summand` is the limit for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.strategies.base import Tensors

MOST_SUMMANDS = 1 << 18
_HIGH, _LOW = 2.0**16, 2.0**44  # units of the high part, and of the low part within it
# Added to a float64 below 2^51, 1.5 2^52 rounds it to a whole number k and leaves k in its last
# bits: read as an integer, the sum is a constant plus k. The same for k / 2^44. Converting numbers
# one by one takes longer. The constants are taken off at the end, modulo 2^64.
_TO_WHOLE, _TO_LOW = 1.5 * 2.0**52, 1.5 * 2.0**52 / _LOW
_WHOLE_BITS, _LOW_BITS = (int(np.float64(one).view(np.int64)) for one in (_TO_WHOLE, _TO_LOW))
_LARGEST = 2.0**46
_SMALL = 1 << 16  # a tensor of fewer numbers is added with others
_BLOCK = 1 << 17  # numbers at once: their parts stay in the cache
_SERIAL = 1 << 12  # numbers that float32 sums well, and torch on one thread

Zeros = Callable[[int], NDArray[np.int64]]


def largest_summand(weights: float) -> float:
    """Return the size of number that can be added up with weights of that sum at most."""
    return _LARGEST / max(weights, 1.0)


def plain_zeros(numbers: int) -> NDArray[np.int64]:
    """Return so many zeros in this process's memory."""
    return np.zeros(numbers, dtype=np.int64)


class ExactSum:
    """A sum of named tensors; the first summand decides names, shapes and types.

    ``zeros`` allocates the sum: so many int64 zeros, perhaps where another process reads them.
    """

    def __init__(self, zeros: Zeros = plain_zeros) -> None:
        self._zeros = zeros
        self._like: dict[str, tuple[torch.Size, torch.dtype]] = {}  # by name
        self._order: list[str] = []  # of the names in ``_parts``: small tensors are added as one
        self._parts: list[NDArray[np.int64]] = []  # (high and low, numbers), with constants
        self._own = False  # whether the first of them is this sum's; others are borrowed
        self._summands = 0  # how often the constants are in it

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the allocator, which belongs to this process."""
        return {name: value for name, value in self.__dict__.items() if name != "_zeros"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore :meth:`__getstate__`."""
        self.__dict__ = {**state, "_zeros": plain_zeros, "_own": False}  # Ray's is read-only

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        """Add ``weight`` times the tensors."""
        if not tensors:
            return
        if not self._like:
            self._begin(tensors)
        self.keep()
        at, space = 0, _space(self._parts[0].shape[1])
        for flat in self._flat(tensors):
            scale = flat.dtype.type(weight * _HIGH)
            for start in range(0, len(flat), _BLOCK):
                self._add_block(flat[start : start + _BLOCK], scale, at + start, space)
            at += len(flat)
        self._summands += 1

    def merge(self, other: Self, *, borrow: bool = False) -> None:
        """Add another part of the same sum.

        ``borrow``: without a copy, so nobody writes to the other until this is read, or keeps it.
        """
        if not other._like:
            return
        self._summands += other._summands
        if not self._like:
            self._like, self._order = other._like, other._order
        self._parts += other._parts
        if not borrow:
            self.keep()

    def keep(self) -> None:
        """Copy what is borrowed."""
        if len(self._parts) > self._own:
            total = self._parts[0] if self._own else self._parts[0].copy()
            for part in self._parts[1:]:
                total += part
            self._parts, self._own = [total], True

    def over(self, divisor: float) -> dict[str, Tensor]:
        """Return the sum over ``divisor``, in the summands' types."""
        found, at = {}, 0
        for name in self._order:
            shape, dtype = self._like[name]
            value = self._value(at, at + shape.numel(), divisor, dtype)
            found[name], at = value.reshape(shape), at + shape.numel()
        return {name: found[name] for name in self._like}

    def _begin(self, tensors: Tensors) -> None:
        self._like = {name: (value.shape, value.dtype) for name, value in tensors.items()}
        self._order = sorted(tensors, key=lambda name: tensors[name].numel() >= _SMALL)
        numbers = sum(value.numel() for value in tensors.values())
        self._parts, self._own = [self._zeros(2 * numbers).reshape(2, numbers)], True

    def _add_block(
        self,
        block: NDArray[Any],
        scale: np.floating[Any],
        at: int,
        space: NDArray[np.float64],
    ) -> None:
        (scaled, whole), (high, low) = (
            space[:, : len(block)],
            self._parts[0][:, at : at + len(block)],
        )
        product = block * scale
        scaled[:] = product
        if max(product.max(), -product.min()) < 2.0**51:
            np.add(scaled, _TO_WHOLE, out=whole)
            high += whole.view(np.int64)
            whole -= _TO_WHOLE
        else:
            np.rint(scaled, out=whole)
            high += whole.astype(np.int64) + _WHOLE_BITS
        scaled -= whole
        scaled += _TO_LOW
        low += scaled.view(np.int64)

    def _value(self, start: int, end: int, divisor: float, dtype: torch.dtype) -> Tensor:
        wide = np.float32 if dtype == torch.float32 else np.float64
        value = np.empty(end - start, wide)  # in large pages, as torch.empty is not
        constants, space = self._constants(), _space(end - start)
        for at in range(start, end, _BLOCK):
            first, *rest = (part[:, at : min(at + _BLOCK, end)] for part in self._parts)
            numbers = first - constants
            for part in rest:
                numbers += part
            whole, total = space[:, : numbers.shape[1]]
            np.copyto(space[:, : numbers.shape[1]], numbers, casting="unsafe")
            total /= _LOW
            total += whole
            total /= _HIGH * divisor
            value[at - start : at - start + len(total)] = total
        return torch.from_numpy(value).to(dtype)

    def _constants(self) -> NDArray[np.int64]:
        """Return what the constants have added up to, modulo 2^64: (high and low, 1)."""
        sums = [self._summands * one % (1 << 64) for one in (_WHOLE_BITS, _LOW_BITS)]
        return np.array(sums, dtype=np.uint64).astype(np.int64).reshape(2, 1)

    def _flat(self, tensors: Tensors) -> Iterator[NDArray[Any]]:
        """Yield the tensors as vectors in host memory, all small ones as one."""
        flat = [_wide(tensors[name].detach().reshape(-1).cpu()).numpy() for name in self._order]
        small = [one for one in flat if len(one) < _SMALL]
        if small:
            yield np.concatenate(small)
        yield from flat[len(small) :]


def _space(numbers: int) -> NDArray[np.float64]:
    """Return room for two numbers of each of a block's; small models must not pay for a large one.

    ``numbers`` is how many there are in all.
    """
    return np.empty((2, min(_BLOCK, numbers)))


def _wide(tensor: Tensor) -> Tensor:
    """Return float64 as it is, and all other types as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def norms_of(tensors: Tensors) -> dict[str, float]:
    """Return the L2 norm of each tensor, the same on any number of threads."""
    if not tensors:
        return {}
    wide = [_wide(value.detach().reshape(-1)) for value in tensors.values()]
    ends = [len(value) // _SERIAL * _SERIAL for value in wide]
    rests = torch._foreach_norm([value[end:] for value, end in zip(wide, ends, strict=True)])
    parts = [
        torch.linalg.vector_norm(value[:end].reshape(-1, _SERIAL), dim=1)
        for value, end in zip(wide, ends, strict=True)
    ]
    squares = iter(torch.cat([*parts, torch.stack(rests)]).double().square().tolist())
    sums = [sum(next(squares) for _ in range(end // _SERIAL)) for end in ends]
    return {name: (one + next(squares)) ** 0.5 for name, one in zip(tensors, sums, strict=True)}
