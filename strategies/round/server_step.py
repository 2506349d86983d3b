"""The server's step, without Flower: valid replies in, new params out, and the state between.

Replies come in one by one (round/reply_fold.py). They are kept only for parts that read single
replies; all other parts read the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fedhet.common.errors import ConfigError, DivergedError
from fedhet.strategies.base import (
    Cohort,
    Payloads,
    Reads,
    Reply,
    ReplySum,
    ServerPart,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.round.reply_fold import FoldSettings, ReplyFold, sum_of, summed_payloads
from fedhet.strategies.round.server_model import BuildsOutputModel, ServerModel, UsesServerModel
from fedhet.strategies.round.update_diagnostics import diagnose, standing_out, step_norm
from fedhet.strategies.slots import (
    Aggregator,
    CombinesReplies,
    Observer,
    Output,
    ReplyTransform,
    ServerOptimizer,
    SumAggregator,
    reads_of,
)
from fedhet.strategies.wire.compressed_records import residual_key
from fedhet.strategies.wire.records import known_shapes
from fedhet.strategies.wire.tensor_files import below

OUTPUT = "output"  # owner of the last output model in the state
_IN_FULL = Reads.REPLIES | Reads.MODELS


@dataclass(frozen=True)
class Stepped:
    """The result of the server's step."""

    params: dict[str, Tensor]  # the new x, buffers included
    diagnostics: Mapping[str, float]  # how far the clients' updates agree (update_diagnostics.py)
    # by client id, what stands out, and how far (update_diagnostics.py)
    alarms: Mapping[int, Mapping[str, float]]
    trust: Mapping[int, float]  # by client id, how far a reply counted under a robust aggregator


@dataclass(eq=False)
class ServerStep:
    """observers, transforms -> aggregator -> server optimiser -> every side's reduce -> output.

    Attributes:
        output_model: tensors of the last output model, buffers included; None: the new x.
    """

    sides: Mapping[str, ServerSide]  # the methods' server halves, by name
    aggregator: Aggregator  # gives Delta
    optimizer: ServerOptimizer  # gives the new x
    transforms: Sequence[ReplyTransform]  # applied in order
    # names of tensors that are not trained: they move by the example-weighted mean; sides,
    # aggregator and optimiser do not see them
    buffers: frozenset[str]
    output: Output  # gives the tensors of the output model
    server_model: ServerModel | None = None  # for the parts that run the model
    observers: Sequence[Observer] = ()  # called every round
    summed: bool = False  # the server knows no single reply

    def __post_init__(self) -> None:
        """Give the model to the parts that run it."""
        model = self.server_model
        self.model_params = {} if model is None else dict(model.model.named_parameters())
        self.server_model = self._bind(model)
        self.output_model: Tensors | None = None
        self.combining = self.aggregator if isinstance(self.aggregator, CombinesReplies) else None
        self.releases_noise = any(side.leaves != Reads.ALL for side in self.sides.values())
        self.summed = self.summed or self.releases_noise

    def init(self, tensors: Tensors, state: Payloads) -> None:
        """Start from ``tensors``; ``state`` (of :meth:`state_dict`) is restored if not empty.

        Raises:
            ConfigError: if there is no tensor, and the aggregator combines models.
        """
        params = self._trainable(tensors)
        if not params and reads_of(self.aggregator) & Reads.MODELS:
            raise ConfigError(
                "strategy.personal leaves the server no tensor (as strategy.personal=all does), "
                f"and strategy.aggregator {type(self.aggregator).__name__} combines models: drop "
                "one from strategy=[...]"
            )
        for owner, part in self._parts().items():
            part.init(params)
            if groups := below(f"{owner}/", state):
                part.load_state_dict(groups)
        output_model = below(f"{OUTPUT}/", state).get("params")
        if output_model and output_model.keys() == tensors.keys():
            output_model = {name: output_model[name] for name in tensors}
        self.output_model = output_model

    def broadcast(self, client: int) -> dict[str, Tensors]:
        """Return all payloads for one client."""
        return {
            name: tensors
            for side in self.sides.values()
            for name, tensors in side.broadcast(client).items()
        }

    def asked(self, client: int) -> None:
        """Tell every side that a client is sent a message to train."""
        for side in self.sides.values():
            side.asked(client)

    def expected(self) -> Shapes:
        """Return the shapes of those reply payloads that a side knows."""
        return {
            name: shapes for side in self.sides.values() for name, shapes in side.expected().items()
        }

    @property
    def keeps_replies(self) -> bool:
        """Whether a part reads single replies, so that a round holds them all."""
        parts = (self.aggregator, self.output, *self.observers, *self.sides.values())
        return (
            bool(self.transforms)
            or any(reads_of(part) & _IN_FULL for part in parts)
            or not summed_payloads(self.sides) <= known_shapes(self.expected()).keys()
        )

    @property
    def least_replies(self) -> int:
        """How many replies the aggregator needs."""
        return 1 if self.combining is None else self.combining.least

    def check_cohort(self, num_clients: int, most: int) -> None:
        """Refuse rounds of at most ``most`` clients if the aggregator needs more."""
        if self.combining is not None:
            self.combining.check_cohort(num_clients, most)

    @property
    def single_check(self) -> Callable[[Reply], None] | None:
        """:meth:`check`, if a side looks at single replies before they are added up."""
        checks = any(type(side).check is not ServerSide.check for side in self.sides.values())
        return self.check if checks else None

    def check(self, reply: Reply) -> None:
        """Let every side refuse a reply."""
        for side in self.sides.values():
            side.check(reply)

    def __call__(
        self,
        tensors: Tensors,
        fold: ReplyFold,
        round: int,
        num_clients: int,
        rebase: Callable[[ReplySum, Tensors], ReplySum] | None = None,
    ) -> Stepped:
        """Return the new tensors, buffers included, and set ``output_model``.

        Args:
            tensors: x and the buffers, as they were sent.
            fold: the valid replies, at least one.
            round: t.
            num_clients: N.
            rebase: see Selection; None: the clients have started from ``tensors``.

        Raises:
            DivergedError: if the new model, or the output model, holds NaN or Inf.
        """
        if self.server_model is not None:
            self.server_model.load(tensors)
        params, replies, settings = self._trainable(tensors), fold.replies, fold.settings
        received = fold.total()
        in_full: Sequence[Reply] = replies if settings.keep else ()
        robust = self.combining is not None
        cohort = Cohort(round, len(replies), num_clients, summed=self.summed, robust=robust)
        for observe in self.observers:
            observe(params, received, in_full, cohort)
        # central privacy covers the sum that it releases, and no norm of a single reply
        known = () if self.releases_noise else received.replies
        total, in_full = self._aggregated(params, received, in_full, settings, round)
        if rebase is not None:
            total = rebase(total, tensors)
        cohort = replace(cohort, size=len(total.replies))
        changes = self._changes(params, total, in_full)
        _require_like("strategy/aggregator", self.aggregator, changes, params, tensors)
        update = self._trainable(changes)
        diagnostics = (step_norm if self.summed else diagnose)(received, update)
        stepped = self.optimizer.step(params, update, cohort)
        _require_like("strategy/server_optimizer", self.optimizer, stepped, params, params)
        for side in self.sides.values():
            side.reduce(total, update, cohort)
        moved = {name: tensors[name] + changes.get(name, c) for name, c in total.buffers.items()}
        new = _typed_as(tensors, {**tensors, **stepped, **moved})
        output_model = self.output(params, update, stepped, in_full)
        if isinstance(self.output, BuildsOutputModel):
            self.output_model = output_model
        else:
            _require_like("strategy/output", self.output, output_model, {}, tensors)
            same = output_model is stepped
            self.output_model = None if same else _typed_as(tensors, {**new, **output_model})
        for what, model in (("new", new), (OUTPUT, self.output_model or {})):
            _require_finite(what, model, known, round)
        trust = {} if self.combining is None else self.combining.trust
        return Stepped(new, diagnostics, standing_out(known), trust)

    def _aggregated(
        self,
        params: Tensors,
        received: ReplySum,
        in_full: Sequence[Reply],
        settings: FoldSettings,
        round: int,
    ) -> tuple[ReplySum, Sequence[Reply]]:
        """Return the inputs of the aggregator: transformed replies in full, and the sum."""
        replies = in_full
        for transform in self.transforms:
            replies = transform(params, replies)
        for side in self.sides.values():
            replies = side.receive(params, replies)
        total = received
        if replies is not in_full:
            total = sum_of(replies, settings.weights, settings.payloads)
        if self.combining is not None:
            total = self.combining.combine(params, total, replies, round)
        total = replace(total, rounding=settings.rounding)
        for side in self.sides.values():
            total = side.release(total)
        return total, replies

    def _changes(
        self, params: Tensors, total: ReplySum, in_full: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return Delta, and the buffers' changes if the aggregator makes them."""
        if isinstance(self.aggregator, SumAggregator):
            return self.aggregator(params, total)
        return self.aggregator(params, in_full)

    def restart_coupled(self, tensors: Tensors) -> frozenset[str]:
        """Reinitialise the parts coupled to client states; return the keys of those states."""
        restarted: frozenset[str] = frozenset()
        for part in self._parts().values():
            if part.coupled_state:
                part.init(self._trainable(tensors))
                needs = part.needs if isinstance(part, ServerSide) else ()
                restarted |= part.coupled_state | {residual_key(name) for name in needs}
        return restarted

    def build_output_model(self, tensors: Tensors) -> nn.Module:
        """Return the model of an output with another architecture than the task's."""
        if not isinstance(self.output, BuildsOutputModel):
            raise ValueError(f"{type(self.output).__name__} has the task's own architecture")
        return self.output.build_model(tensors)

    def metrics(self) -> dict[str, float]:
        """Return the sides' metrics of the finished round."""
        reported = [side.metrics() for side in self.sides.values()]
        return {name: value for part in reported for name, value in part.items()}

    def state_dict(self) -> dict[str, Tensors]:
        """Return every part's state, by "<owner>/<group>"."""
        states = {owner: part.state_dict() for owner, part in self._parts().items()}
        if self.output_model is not None:  # kept if the next round fails
            states[OUTPUT] = {"params": self.output_model}
        return {
            f"{owner}/{group}": values
            for owner, groups in states.items()
            for group, values in groups.items()
        }

    def _parts(self) -> dict[str, ServerPart]:
        combining = {} if self.combining is None else {"aggregator": self.combining}
        return {"server_optimizer": self.optimizer, **combining, **self.sides}

    def _trainable(self, tensors: Tensors) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if name not in self.buffers}

    def _bind(self, server_model: ServerModel | None) -> ServerModel | None:
        """Give the model to the parts that run it; return it if there are any."""
        observers = {f"observer {number}": part for number, part in enumerate(self.observers)}
        parts = {"aggregator": self.aggregator, "output": self.output, **self.sides, **observers}
        running = {name: part for name, part in parts.items() if isinstance(part, UsesServerModel)}
        for name, part in running.items():
            if server_model is None:
                raise ConfigError(
                    f"{name} {type(part).__name__} needs the model at the server: pass "
                    "server_model=ServerModel(...) (server_model.py) to the strategy, or give an "
                    "app its class or its recipe's name in place of an object"
                )
            part.bind(server_model)
        return server_model if running else None


def _require_like(slot: str, part: object, found: Any, least: Tensors, most: Tensors) -> None:
    """Refuse a part's result unless it is tensors by name, at least ``least``, in their shapes.

    Raises:
        ConfigError: names the part and the tensor.
    """
    start = f"{slot}: {type(part).__name__} gave"
    if not isinstance(found, Mapping):
        raise ConfigError(f"{start} a {type(found).__name__}: it must give tensors by name")
    if missing := sorted(least.keys() - found.keys()):
        raise ConfigError(f"{start} no {missing[0]!r}: it must give all of {sorted(least)}")
    for name, value in found.items():
        shape = tuple(most[name].shape) if name in most else None
        if shape is None:
            raise ConfigError(f"{start} {name!r}, which is not one of {sorted(most)}")
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            what = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(f"{start} {name!r} as {what}: it must be a tensor of shape {shape}")


def _typed_as(tensors: Tensors, model: Tensors) -> dict[str, Tensor]:
    """Return a model in the types of ``tensors``: slots may compute in wider ones."""
    return {name: value.to(tensors[name].dtype) for name, value in model.items()}


def _require_finite(what: str, model: Tensors, replies: Sequence[Reply], round: int) -> None:
    """Raise a DivergedError that names the client with the largest update."""
    for name, value in model.items():
        if not value.is_floating_point() or value.numel() == 0:
            continue
        if not all(math.isfinite(end) for end in value.aminmax()):
            message = f"in round {round} the {what} model's {name!r} would hold NaN or Inf"
            if len(replies) > 1:  # else it is the client's, or a secure sum
                largest = max(replies, key=lambda reply: reply.norm)
                message += (
                    f"; the largest update, of norm {largest.norm:.3g}, is that of client "
                    f"{largest.client_id}"
                )
            raise DivergedError(message)
