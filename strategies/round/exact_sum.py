"""Sums of tensors whose bits do not depend on the order of the summands: fixed point in integers.

A summand w v becomes two whole numbers, which add up exactly:

    high = round(w v 2^16),   low = round((w v 2^16 - high) 2^44)
    sum_i w_i v_i = 2^-16 sum_i high_i + 2^-60 sum_i low_i

So it is all the same who adds which clients first, in how many parts, and who else was asked. The
resolution is 2^-60: float32 numbers from 2^-36 on are added without any rounding. Two 64-bit
integers hold sums up to 2^46 of up to 2^18 clients; :func:`largest_summand` is what each may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fedhet.strategies.base import Tensors

MOST_SUMMANDS = 1 << 18
_HIGH, _LOW = 2.0**16, 2.0**44  # units of the high part, and of the low part within it
_LARGEST = 2.0**46
_BLOCK = 1 << 16  # numbers at once: what is made of them stays in the cache
_SERIAL = 1 << 12  # numbers that float32 sums well, and torch on one thread
_SMALL = ""  # the key of all small tensors, which are added as one


def largest_summand(weights: float) -> float:
    """Return the size of number that can be added up with weights of that sum at most."""
    return _LARGEST / max(weights, 1.0)


class ExactSum:
    """A sum of named tensors; the first summand decides names, shapes and types."""

    def __init__(self) -> None:
        self._high: dict[str, Tensor] = {}  # (numbers,), int64
        self._low: dict[str, Tensor] = {}
        self._like: dict[str, Tensor] = {}  # by name, of the summands' shapes and types, empty

    def __getstate__(self) -> dict[str, Any]:
        """Return NumPy arrays: a pickle of tensors copies them several times."""
        parts = {"high": self._high, "low": self._low}
        return {
            name: {key: part.numpy() for key, part in of.items()} for name, of in parts.items()
        } | {"like": {name: (one.shape, one.dtype) for name, one in self._like.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore :meth:`__getstate__`."""
        self._high, self._low = (  # Ray's arrays are read-only
            {
                key: torch.from_numpy(np.require(p, requirements="W"))
                for key, p in state[name].items()
            }
            for name in ("high", "low")
        )
        self._like = {
            name: torch.empty(shape, dtype=dtype, device="meta")
            for name, (shape, dtype) in state["like"].items()
        }

    def add(self, tensors: Tensors, weight: float = 1.0) -> None:
        """Add ``weight`` times the tensors."""
        if not self._like:
            self._like = {n: torch.empty_like(v, device="meta") for n, v in tensors.items()}
        for key, flat in self._flat(tensors):
            if key not in self._high:
                self._high[key] = torch.zeros(len(flat), dtype=torch.int64)
                self._low[key] = torch.zeros(len(flat), dtype=torch.int64)
            high, low = self._high[key], self._low[key]
            for start in range(0, len(flat), _BLOCK):
                block = slice(start, start + _BLOCK)
                scaled = flat[block] * (weight * _HIGH)
                whole = scaled.round()
                high[block] += whole.to(torch.int64)
                low[block] += scaled.sub_(whole).mul_(_LOW).round_().to(torch.int64)

    def merge(self, other: Self) -> None:
        """Add another part of the same sum."""
        if not self._like:
            self._high, self._low, self._like = other._high, other._low, other._like
            return
        for key, high in other._high.items():
            self._high[key] += high
            self._low[key] += other._low[key]

    def over(self, divisor: float) -> dict[str, Tensor]:
        """Return the sum over ``divisor``, in the summands' types."""
        small = [name for name, like in self._like.items() if _is_small(like)]
        sizes = [self._like[name].numel() for name in small]
        values = {key: self._value(key, divisor) for key in self._high}
        if small:
            values |= zip(small, torch.split(values.pop(_SMALL), sizes), strict=True)
        return {
            name: values[name].to(like.dtype).reshape(like.shape)
            for name, like in self._like.items()
        }

    def _value(self, key: str, divisor: float) -> Tensor:
        total = self._low[key].double().div_(_LOW).add_(self._high[key])
        return total.div_(_HIGH * divisor)

    def _flat(self, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors as vectors in host memory, all small ones as one."""
        small = []
        for name, like in self._like.items():
            flat = _wide(tensors[name].detach().reshape(-1).cpu())
            if _is_small(like):
                small.append(flat)
            else:
                yield name, flat
        if small:
            yield _SMALL, torch.cat(small)


def _wide(tensor: Tensor) -> Tensor:
    """Return float64 as it is, and all other types as float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() < _BLOCK


def norms_of(tensors: Tensors) -> dict[str, float]:
    """Return the L2 norm of each tensor, the same on any number of threads."""
    wide = {name: _wide(value.detach().reshape(-1)) for name, value in tensors.items()}
    parts = {name: torch.split(value, _SERIAL) for name, value in wide.items()}
    blocks = [block for of_tensor in parts.values() for block in of_tensor]
    if not blocks:
        return {}
    norms = iter(torch.stack(torch._foreach_norm(blocks)).double().square().tolist())
    squares = {name: sum(next(norms) for _ in of_tensor) for name, of_tensor in parts.items()}
    return {name: square**0.5 for name, square in squares.items()}
