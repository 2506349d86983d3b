"""The server's step, free of Flower: valid replies in, new params out, and the state between.

Replies come in one by one (round/reply_fold.py). They are kept only for parts that read single
ones; all others read the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError, DivergedError, require_choice
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    Payloads,
    Reply,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
    Weighting,
)
from fedhet.strategies.modes.robust.aggregator import RobustAggregator
from fedhet.strategies.round.alarm import standing_out
from fedhet.strategies.round.exact_sum import largest_summand
from fedhet.strategies.round.reply_fold import (
    FoldRule,
    Limits,
    ReplyFold,
    SumRule,
    known_shapes,
    per_example,
    sum_of,
    summed_payloads,
)
from fedhet.strategies.round.server_model import BuildsOutputModel, ServerModel, UsesServerModel
from fedhet.strategies.round.update_diagnostics import diagnose, step_norm
from fedhet.strategies.slots import (
    Aggregator,
    Observer,
    Output,
    ReadsNoReply,
    ReplyTransform,
    ServerOptimizer,
    SumAggregator,
)
from fedhet.strategies.wire.border import ExpectedReply, largest_of, widest_of
from fedhet.strategies.wire.compressed_records import compressed_shapes, residual_key
from fedhet.strategies.wire.tensor_files import below

OUTPUT = "output"  # owner of the last output model in the state


class ServerStep:
    """observers, transforms -> aggregator -> server optimiser -> output, then every side's reduce.

    Args:
        sides: the methods' server halves, by name.
        aggregator: gives Delta.
        optimizer: gives the new x.
        transforms: applied in order.
        buffers: names of tensors that are not trained: they move by the example-weighted mean;
            sides, aggregator and optimiser do not see them.
        output: gives the tensors of the output model.
        server_model: for the parts that run the model.
        observers: called every round.

    Attributes:
        output_model: tensors of the last output model, buffers included; None: the new x.
        summed: the server knows no single reply (modes/checks.py), so that diagnostics of the
            round's updates are those of their sum.
        rounding: step to which this round's clients round what a secure sum adds up; 0: none.
        alarms: of the last round by client id, what stands out, and how far (round/alarm.py);
            none under central privacy.
    """

    def __init__(
        self,
        sides: Mapping[str, ServerSide],
        aggregator: Aggregator,
        optimizer: ServerOptimizer,
        transforms: Sequence[ReplyTransform],
        buffers: Collection[str],
        output: Output,
        server_model: ServerModel | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.sides = dict(sides)
        self.aggregator = aggregator
        self.optimizer = optimizer
        self.transforms = tuple(transforms)
        self.buffers = frozenset(buffers)
        self.output = output
        self.observers = tuple(observers)
        self.server_model = self._bind(server_model)
        self._model = dict(server_model.model.named_parameters()) if server_model else {}
        self.output_model: Tensors | None = None
        self.summed, self.rounding = False, 0.0
        self._diagnostics: dict[str, float] = {}
        self.alarms: dict[int, dict[str, float]] = {}
        self.robust = aggregator if isinstance(aggregator, RobustAggregator) else None

    def init(self, tensors: Tensors, state: Payloads) -> None:
        """Start from ``tensors``; ``state`` (of :meth:`state_dict`) is restored if not empty."""
        params = self._trainable(tensors)
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

    def fold_rule(
        self,
        params: Tensors,
        client_sides: Mapping[str, ClientSide],
        lr: Mapping[int, float],
        num_clients: int,
        most_weight: float,
        limits: Mapping[int, Limits],
    ) -> FoldRule:
        """Return what a round's replies must be, and how they are added up.

        Args:
            params: as they were sent, buffers included.
            client_sides: the methods' client halves.
            lr: eta_l that the clients were told, by id.
            num_clients: N.
            most_weight: that all weights of a round can sum to.
            limits: of the round's clients, by id.
        """
        sides, everything = client_sides.values(), {**self._model, **params}
        summed, grown = summed_payloads(self.sides), per_example(client_sides)
        name = "weighting" if isinstance(self.aggregator, SumAggregator) else "weighs"
        given: Weighting = getattr(self.aggregator, name, "clients")
        by = require_choice(f"{type(self.aggregator).__name__}.{name}", given, get_args(Weighting))
        largest = min(largest_of(everything, num_clients), largest_summand(most_weight))
        expected = ExpectedReply(
            {name: torch.empty_like(value, device="meta") for name, value in params.items()},
            self.buffers,
            payloads={name for side in sides for name in side.sends},
            shapes=self.expected(),
            dtypes={name: kind for side in sides for name, kind in side.dtypes.items()},
            measures={name for side in sides for name in side.measures},
            widest=widest_of(everything),
            largest=largest,
            per_example=grown,
            lr=lr,
            compressed=compressed_shapes(client_sides, known_shapes(self.expected())),
        )
        return FoldRule(expected, limits, SumRule(by, summed), keep=self.keeps_replies)

    @property
    def keeps_replies(self) -> bool:
        """Whether a part reads single replies, so that a round holds them all."""
        return (
            not isinstance(self.aggregator, SumAggregator)
            or self.robust is not None
            or not isinstance(self.output, ReadsNoReply)
            or bool(self.transforms)
            or any(getattr(observer, "keeps_replies", True) for observer in self.observers)
            or any(side.keeps_replies for side in self.sides.values())
            or not summed_payloads(self.sides) <= known_shapes(self.expected()).keys()
        )

    @property
    def least_replies(self) -> int:
        """How many replies the aggregator needs."""
        return 1 if self.robust is None else self.robust.least

    def check_cohort(self, num_clients: int, most: int) -> None:
        """Refuse rounds of at most ``most`` clients if the aggregator needs more."""
        if self.robust is not None:
            self.robust.check_cohort(num_clients, most)

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
    ) -> dict[str, Tensor]:
        """Return the new tensors, buffers included, and set ``output_model``.

        Args:
            tensors: x and the buffers, as they were sent.
            fold: the valid replies, at least one.
            round: t.
            num_clients: N.
            rebase: see Chosen; None: the clients have started from ``tensors``.

        Raises:
            DivergedError: if the new model, or the output model, holds NaN or Inf.
        """
        if self.server_model is not None:
            self.server_model.load(tensors)
        params, replies = self._trainable(tensors), fold.replies
        received = fold.total()
        kept: Sequence[Reply] = replies if fold.rule.keep else ()
        robust = self.robust is not None
        cohort = Cohort(round, len(replies), num_clients, summed=self.summed, robust=robust)
        for observe in self.observers:
            observe(params, received, kept, cohort)
        # central privacy covers the sum that it releases, and no norm of a single reply
        averaged = any(side.averages for side in self.sides.values())
        known = () if averaged else received.replies
        self.alarms = standing_out(known)
        total, kept = self._aggregated(params, received, kept, fold.rule.sum, round)
        if rebase is not None:
            total = rebase(total, tensors)
        cohort = replace(cohort, size=len(total.replies))
        changes = self._changes(params, total, kept)
        _require_like("strategy/aggregator", self.aggregator, changes, params, tensors)
        update = self._trainable(changes)
        self._diagnostics = (step_norm if self.summed else diagnose)(received, update)
        stepped = self.optimizer.step(params, update, cohort)
        _require_like("strategy/server_optimizer", self.optimizer, stepped, params, params)
        for side in self.sides.values():
            side.reduce(total, update, cohort)
        moved = {name: tensors[name] + changes.get(name, c) for name, c in total.buffers.items()}
        new = _typed_as(tensors, {**tensors, **stepped, **moved})
        output_model = self.output(params, update, stepped, kept)
        if isinstance(self.output, BuildsOutputModel):
            self.output_model = output_model
        else:
            _require_like("strategy/output", self.output, output_model, {}, tensors)
            same = output_model is stepped
            self.output_model = None if same else _typed_as(tensors, {**new, **output_model})
        for what, model in (("new", new), (OUTPUT, self.output_model or {})):
            _require_finite(what, model, known, round)
        return new

    def _aggregated(
        self,
        params: Tensors,
        received: ReplySum,
        kept: Sequence[Reply],
        rule: SumRule,
        round: int,
    ) -> tuple[ReplySum, Sequence[Reply]]:
        """Return what is aggregated: transformed replies that are kept, and the released sum."""
        replies = kept
        for transform in self.transforms:
            replies = transform(params, replies)
        for side in self.sides.values():
            replies = side.receive(params, replies)
        total = received if replies is kept else sum_of(replies, rule)
        if self.robust is not None:
            total = self.robust.combine(params, total, replies, round)
        total = replace(total, rounding=self.rounding)
        for side in self.sides.values():
            total = side.release(total)
        return total, replies

    def _changes(
        self, params: Tensors, total: ReplySum, kept: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return Delta, and the buffers' changes if the aggregator makes them."""
        if isinstance(self.aggregator, SumAggregator):
            return self.aggregator(params, total)
        return self.aggregator(params, kept)

    def restart_coupled(self, tensors: Tensors) -> frozenset[str]:
        """Reinitialise the parts that are coupled to client states; return those states' keys."""
        restarted: frozenset[str] = frozenset()
        for part in self._parts().values():
            coupled_state: frozenset[str] = getattr(part, "coupled_state", frozenset())
            if coupled_state:
                part.init(self._trainable(tensors))
                restarted |= coupled_state | {residual_key(n) for n in getattr(part, "needs", ())}
        return restarted

    def build_output_model(self, tensors: Tensors) -> nn.Module:
        """Return the model of an output of another architecture than the task's."""
        if not isinstance(self.output, BuildsOutputModel):
            raise ValueError(f"{type(self.output).__name__} has the task's own architecture")
        return self.output.build_model(tensors)

    def metrics(self) -> dict[str, float]:
        """Return the diagnostics of the round's updates and the sides' metrics."""
        reported = [side.metrics() for side in self.sides.values()]
        return self._diagnostics | {n: value for part in reported for n, value in part.items()}

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

    def _parts(self) -> dict[str, ServerSide | ServerOptimizer | RobustAggregator]:
        robust = {} if self.robust is None else {"aggregator": self.robust}
        return {"server_optimizer": self.optimizer, **robust, **self.sides}

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
                    f"{name} {type(part).__name__} runs the model at the server: pass "
                    "server_model=ServerModel(...) (server_model.py) to the strategy, or give an "
                    "app its class or its recipe's name in place of an object"
                )
            part.bind(server_model)
        return server_model if running else None


def _require_like(slot: str, part: object, found: Any, least: Tensors, most: Tensors) -> None:
    """Refuse what a part gives, if it is no tensors by name, of ``least`` or more, of their shapes.

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
            raise ConfigError(f"{start} {name!r}, which is none of {sorted(most)}")
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
