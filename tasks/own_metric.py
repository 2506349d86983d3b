"""A metric of the user's own: a function (outputs, targets) -> one number, over all examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from logging import WARNING, getLogger
from typing import Any

import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.common.metrics import row_name
from fedhet.common.outside import no_exit, said_by
from fedhet.tasks.references import load_reference, require_pair


class OwnMetric:
    """Calls the function that a word of ``evaluation.metrics`` names.

    Args:
        word: ``package.module:function``.

    Raises:
        ConfigError: if there is no such function, or it does not take outputs and targets.
    """

    def __init__(self, word: str) -> None:
        self.name, self._word = row_name(word), word
        self._function = load_reference("evaluation.metrics", word)
        self._has_warned = False
        if isinstance(self._function, type):
            raise ConfigError(f"{self._start} is a class: name a function (outputs, targets)")
        require_pair(f"{self._start} must be a function", self._function, "one number")

    def value(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Return the number over all examples; the log warns once of NaN or Inf, which rows omit.

        A ValueError or an ArithmeticError of the function counts as NaN: a site's examples may not
        define the number, as examples of one class define no area under the curve.

        The function gets its own tensors on the CPU, which it may change.

        Raises:
            ConfigError: if the function fails in another way, or does not return a number.
        """
        outputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        count, why = len(targets), ""  # the function may change them
        found: Any = math.nan
        try:
            with no_exit(self._start):
                found = self._function(outputs, targets)
        except ConfigError:
            raise
        except (ValueError, ArithmeticError) as error:
            why = f", by a {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        except Exception as error:
            raise ConfigError(f"{self._start} failed: {said_by(error)}") from error
        value = self._number(found)
        if not math.isfinite(value) and not self._has_warned:
            text = "%s is %s on %s examples%s: rows leave it out if it is not finite"
            getLogger("flwr").log(WARNING, text, self._start, value, count, why)
            self._has_warned = True
        return value

    def _number(self, value: Any) -> float:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            return float(value)
        except OverflowError:  # an int that no float holds
            return math.inf
        except (TypeError, ValueError, RuntimeError):
            shape = tuple(getattr(value, "shape", ()))
            what = f"{type(value).__name__}{f' of the shape {shape}' if shape else ''}"
            raise ConfigError(
                f"{self._start} must return one number, but returned a {what}"
            ) from None

    @property
    def _start(self) -> str:
        return f"evaluation.metrics={self._word}"
