"""Local training: epochs, batches, phases; checked at the server before round 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from fedhet.common.errors import ConfigError, require_choice, require_range, require_whole
from fedhet.strategies.components.tensor_selection import TensorSelector


@dataclass(frozen=True)
class Phase:
    """A part of local training in which only some tensors are trained."""

    layers: TensorSelector
    epochs: int | None = None  # None: what the others leave of local.epochs, or all local.steps


@dataclass(frozen=True)
class LocalTrainingConfig:
    """How long and how a client trains."""

    batch_size: int = 32  # examples per mini-batch
    epochs: int | None = 1  # passes over the client's data; None when ``steps`` is given
    steps: int | None = None  # optimizer steps; None when ``epochs`` is given
    drop_last: bool = False  # leave out a last, smaller batch (FedPVR's released loaders do)
    clip: float | None = None  # maximum L2 norm of the corrected gradient; None does not clip
    autocast: bool = False  # compute the forward pass in bfloat16
    # where round 1 starts: the model as "received", or random numbers of the client's "own"
    # (one-shot methods)
    initial: Literal["received", "own"] = "received"
    # the folder of a run of the same training that kept its clients' models: they take the place of
    # training
    reuse_training: str | None = None
    # train some tensors, then others; empty: all tensors all the time
    phases: tuple[Phase, ...] = ()

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_whole("local.batch_size", self.batch_size, low=1)
        if (self.epochs is None) == (self.steps is None):
            raise ConfigError(
                f"local.epochs={self.epochs} and local.steps={self.steps}: give exactly one, and "
                "set the other to null"
            )
        for key, length in (("local.epochs", self.epochs), ("local.steps", self.steps)):
            if length is not None:
                require_whole(key, length, low=1)
        require_choice("local.initial", self.initial, ("received", "own"))
        if self.clip is not None:
            require_range("local.clip", self.clip, open_low=True)
        self._check_phases()

    def schedule(self) -> list[Phase]:
        """Return the phases in order, their lengths filled in; the last one may count in steps."""
        if not self.phases:
            return [Phase(TensorSelector("all"), self.epochs)]
        if self.epochs is None:
            return list(self.phases)
        rest = self.epochs - sum(phase.epochs or 0 for phase in self.phases)
        return [Phase(p.layers, rest if p.epochs is None else p.epochs) for p in self.phases]

    def untrained(self, names: Iterable[str]) -> set[str]:
        """Return which of the model's parameters no phase trains; clients do not send them."""
        names = list(names)
        trained = {name for phase in self.phases for name in phase.layers.select(names)}
        return set(names) - trained if self.phases else set()

    def max_steps(self, num_examples: int) -> int:
        """Return the most optimizer steps that a client of so many examples can take."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return self.epochs * math.ceil(num_examples / self.batch_size)

    def batches(self, num_examples: int) -> int:
        """Return how many batches a pass over so many examples has."""
        rest = self.drop_last and num_examples > self.batch_size
        return (
            num_examples // self.batch_size if rest else math.ceil(num_examples / self.batch_size)
        )

    def smallest_batch(self, num_examples: int) -> int:
        """Return the fewest examples that a client with so many takes a step on."""
        rest = num_examples % self.batch_size
        reached = self.steps is None or self.steps >= math.ceil(num_examples / self.batch_size)
        if rest and reached and not self.drop_last:
            return rest
        return min(num_examples, self.batch_size)

    def _check_phases(self) -> None:
        lengths = [phase.epochs for phase in self.phases]
        given = [length for length in lengths if length is not None]
        if self.epochs is None and len(lengths) > 1:
            raise ConfigError(
                f"local.steps={self.steps} with {len(lengths)} strategy.phases, which count "
                "epochs: set local.epochs, and local.steps=null"
            )
        if lengths.count(None) > 1 or min(given, default=1) < 1:
            raise ConfigError(
                f"strategy.phases have the epochs {lengths}: each must be >= 1, and at most one "
                "null (the rest of local.epochs)"
            )
        if not lengths or self.epochs is None:
            return
        if not (sum(given) < self.epochs if None in lengths else sum(given) == self.epochs):
            raise ConfigError(
                f"strategy.phases have the epochs {lengths} and local.epochs={self.epochs}: they "
                "must add up to it, or leave something for the one that is null"
            )


def local_training_config(
    local: Mapping[str, Any], phases: Sequence[Mapping[str, Any]] = ()
) -> LocalTrainingConfig:
    """Return the options that the recipe's ``local`` and ``strategy.phases`` hold, checked."""
    values = {f.name: local[f.name] for f in fields(LocalTrainingConfig) if f.name != "phases"}
    parsed = tuple(
        Phase(TensorSelector(phase["layers"], "strategy.phases"), phase.get("epochs"))
        for phase in phases
    )
    return LocalTrainingConfig(**values, phases=parsed)
