"""The plain attributes of a network's modules, beside parameters and buffers."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor, nn

FROZEN = "_fedhet_frozen"  # a module's attributes that hold its frozen tensors
_OF_TORCH = vars(nn.Module()).keys()
_VALUES = (int, float, complex, str, bytes, type(None))


class PlainAttributes:
    """Remembers the plain attributes of modules and restores them.

    Otherwise what forward writes there, such as the hidden state of a recurrent network, would pass
    from one client to the next. Tensors, arrays, numbers, texts, None, and containers of these are
    plain; parameters, modules and other objects are left alone.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._kept: list[tuple[dict[str, Any], frozenset[str], dict[str, Any], list[str]]] = []
        for module in modules:
            variables = vars(module)
            hidden = {*_OF_TORCH, *getattr(module, FROZEN, ())}
            plain = {
                name: _copied(value)
                for name, value in variables.items()
                if name not in hidden and _is_plain(value)
            }
            # most are numbers and tuples of them: immutable, so they need no copy
            changing = [name for name, value in plain.items() if _copied(value) is not value]
            self._kept.append((variables, frozenset(variables), plain, changing))

    def put_back(self) -> None:
        """Restore changed attributes, and remove new ones."""
        for variables, known, plain, changing in self._kept:
            for name in variables.keys() - known:
                if _is_plain(variables[name]):
                    del variables[name]
            variables.update(plain)
            variables.update({name: _copied(plain[name]) for name in changing})


def _is_plain(value: Any) -> bool:
    if isinstance(value, nn.Parameter):
        return False
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, tuple | list | deque | set):
        return all(map(_is_plain, value))
    return isinstance(value, (Tensor, np.ndarray, *_VALUES))


def _copied(value: Any) -> Any:
    """Return a plain value that shares no tensor, array or container with it."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        items = [_copied(one) for one in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, _VALUES):
        return value
    new = copy.copy(value)
    if isinstance(value, dict | list | deque):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            new[key] = _copied(one)
    return new
