"""The server's step, free of Flower: valid replies in, new params out, and the state between."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from fedhet.common.errors import ConfigError, DivergedError
from fedhet.strategies.base import (
    Aggregator,
    ClientSide,
    Cohort,
    Observer,
    Output,
    Payloads,
    Reply,
    ReplyTransform,
    ServerOptimizer,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.components.aggregators import mean_of
from fedhet.strategies.round.decoder import ExpectedReply, largest_of, widest_of
from fedhet.strategies.round.server_model import BuildsOutputModel, ServerModel, UsesServerModel
from fedhet.strategies.round.tensor_files import below
from fedhet.strategies.statistics.update_diagnostics import diagnose, norm

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
        diagnose: (replies as received, Delta) -> scalars to report of the round's updates.
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
        self.diagnose: Callable[[Sequence[Reply], Tensors], dict[str, float]] = diagnose
        self._diagnostics: dict[str, float] = {}

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

    def expected(self) -> Shapes:
        """Return the shapes of those reply payloads that a side knows."""
        return {
            name: shapes for side in self.sides.values() for name, shapes in side.expected().items()
        }

    def expected_reply(
        self, params: Tensors, client_sides: Mapping[str, ClientSide], lr: float, num_clients: int
    ) -> ExpectedReply:
        """Return what a round's replies must be; ``params`` were sent, ``lr`` is eta_l."""
        sides, everything = client_sides.values(), {**self._model, **params}
        return ExpectedReply(
            params,
            self.buffers,
            payloads={name for side in sides for name in side.sends},
            shapes=self.expected(),
            dtypes={name: kind for side in sides for name, kind in side.dtypes.items()},
            measures={name for side in sides for name in side.measures},
            widest=widest_of(everything),
            largest=largest_of(everything, num_clients),
            lr=lr,
        )

    def check(self, reply: Reply) -> None:
        """Let every side refuse a reply."""
        for side in self.sides.values():
            side.check(reply)

    def check_together(self, replies: Sequence[Reply]) -> dict[int, str]:
        """Return which clients' replies a side refuses beside the others', and why."""
        found = (side.check_together(replies) for side in self.sides.values())
        return {client: reason for refused in found for client, reason in refused.items()}

    def __call__(
        self, tensors: Tensors, replies: Sequence[Reply], round: int, num_clients: int
    ) -> dict[str, Tensor]:
        """Return the new tensors, buffers included, and set ``output_model``.

        ``tensors`` are x and the buffers, as they were sent; ``replies`` are sorted by client id.

        Raises:
            DivergedError: if the new model, or the output model, holds NaN or Inf.
        """
        if self.server_model is not None:
            self.server_model.load(tensors)
        params = self._trainable(tensors)
        cohort = Cohort(round, len(replies), num_clients)
        for observe in self.observers:
            observe(params, replies, cohort)
        received = replies
        for transform in self.transforms:
            replies = transform(params, replies)
        for side in self.sides.values():
            replies = side.receive(params, replies)
        cohort = replace(cohort, size=len(replies))
        changes = self.aggregator(params, replies)
        update = self._trainable(changes)
        self._diagnostics = self.diagnose(received, update)
        stepped = self.optimizer.step(params, update, cohort)
        for side in self.sides.values():
            side.reduce(replies, update, cohort)
        new = {**tensors, **stepped, **self._new_buffers(tensors, replies, changes)}
        output_model = self.output(params, update, stepped, replies)
        if isinstance(self.output, BuildsOutputModel):
            self.output_model = output_model
        else:
            self.output_model = None if output_model is stepped else {**new, **output_model}
        for what, model in (("new", new), (OUTPUT, self.output_model or {})):
            _require_finite(what, model, received, round)
        return new

    def restart_coupled(self, tensors: Tensors) -> frozenset[str]:
        """Reinitialise the parts that are coupled to client states; return those states' keys."""
        restarted: frozenset[str] = frozenset()
        for part in self._parts().values():
            coupled_state: frozenset[str] = getattr(part, "coupled_state", frozenset())
            if coupled_state:
                part.init(self._trainable(tensors))
                restarted |= coupled_state
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

    def _parts(self) -> dict[str, ServerSide | ServerOptimizer]:
        return {"server_optimizer": self.optimizer, **self.sides}

    def _trainable(self, tensors: Tensors) -> dict[str, Tensor]:
        return {name: value for name, value in tensors.items() if name not in self.buffers}

    def _new_buffers(
        self, tensors: Tensors, replies: Sequence[Reply], changes: Tensors
    ) -> dict[str, Tensor]:
        """Return the buffers, moved by the aggregator's change or else the clients' mean change."""
        if not self.buffers:
            return {}
        mean = mean_of([r.buffers for r in replies], [r.num_examples for r in replies])
        return {name: tensors[name] + changes.get(name, change) for name, change in mean.items()}

    def _bind(self, server_model: ServerModel | None) -> ServerModel | None:
        """Give the model to the parts that run it; return it if there are any."""
        observers = {f"observer {number}": part for number, part in enumerate(self.observers)}
        parts = {"aggregator": self.aggregator, "output": self.output, **self.sides, **observers}
        running = {name: part for name, part in parts.items() if isinstance(part, UsesServerModel)}
        for name, part in running.items():
            if server_model is None:
                raise ConfigError(
                    f"{name} {type(part).__name__} runs the model at the server: pass "
                    "server_model=ServerModel(...) (server_model.py) to the strategy"
                )
            part.bind(server_model)
        return server_model if running else None


def _require_finite(what: str, model: Tensors, replies: Sequence[Reply], round: int) -> None:
    """Raise a DivergedError that names the client with the largest update."""
    for name, value in model.items():
        if not value.is_floating_point() or value.numel() == 0:
            continue
        if not all(math.isfinite(end) for end in value.aminmax()):
            message = f"in round {round} the {what} model's {name!r} would hold NaN or Inf"
            if len(replies) > 1:  # else it is the client's, or a secure sum
                largest = max(replies, key=lambda reply: norm(reply.update))
                message += (
                    f"; the largest update, of norm {norm(largest.update):.3g}, is that of client "
                    f"{largest.client_id}"
                )
            raise DivergedError(message)
