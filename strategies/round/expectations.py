"""What a run expects from a round's replies, given recipe, registration and method."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import get_args

import torch

from fedhet.common.errors import require_choice
from fedhet.strategies.base import ClientSide, Tensors, Weighting
from fedhet.strategies.round.exact_sum import largest_summand
from fedhet.strategies.round.registration import ClientRegistry
from fedhet.strategies.round.reply_fold import FoldSettings, Weights, summed_payloads
from fedhet.strategies.round.selection import Selection
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.slots import SumAggregator, Weighs
from fedhet.strategies.wire.border import (
    Bounds,
    Expected,
    ExpectedPayload,
    Sender,
    largest_of,
    widest_of,
)
from fedhet.strategies.wire.client_versions import ClientVersions
from fedhet.strategies.wire.compressed_records import compressed_shapes, per_example
from fedhet.strategies.wire.compression import Compression
from fedhet.strategies.wire.records import known_shapes


@dataclass(frozen=True)
class Expectations:
    """Gives the settings with which a round's replies are folded."""

    step: ServerStep  # the server's
    client_sides: Mapping[str, ClientSide]  # the methods' client halves, by name
    # the most steps of a client with so many examples; None: steps are not checked
    max_steps: Callable[[int], int] | None
    # names of the numbers that clients may send besides those of their sides
    measures: Collection[str]
    compression: Compression  # of what the clients send
    untrained: Collection[str] = ()  # names of the tensors that they do not send

    def of_round(
        self,
        params: Tensors,
        registry: ClientRegistry,
        versions: ClientVersions,
        selection: Selection,
        told: Mapping[int, tuple[int, float]],
    ) -> FoldSettings:
        """Return the settings where every client sends a reply.

        Args:
            params: as they were sent, buffers included.
            registry: what the clients have registered.
            versions: of the client states.
            selection: the round's clients.
            told: t and eta_l by client id.
        """
        senders, most = {}, float(len(told))
        for client, (round, lr) in told.items():
            examples = registry.num_examples[client]
            steps = self.max_steps(examples) if self.max_steps else None
            senders[client] = Sender(lr, round, examples, steps, versions.not_lost(client))
        measured = {name for side in self.client_sides.values() for name in side.measures}
        bounds = self._bounds(params, len(registry), most, largest_summand(most))
        expected = self._expected(
            params, senders, bounds, {*measured, *self.measures}, self.compression
        )
        expected = replace(expected, untrained=self.untrained)
        return self._settings(expected, selection.discounts)

    def of_secure_round(
        self,
        params: Tensors,
        registry: ClientRegistry,
        selection: Selection,
        max_examples: int,
        rounding: float,
    ) -> FoldSettings:
        """Return the settings where the server makes the replies itself, of a secure sum.

        ``max_examples`` are the most of a client, ``rounding`` is the step to which clients round
        their numbers; the others: see :meth:`of_round`.
        """
        senders = dict.fromkeys(selection.clients, Sender())
        bounds = self._bounds(params, len(registry), float(max_examples * len(senders)))
        expected = self._expected(params, senders, bounds, None, Compression())
        return self._settings(expected, {}, rounding)

    def _settings(
        self, expected: Expected, discounts: Mapping[int, float], rounding: float = 0.0
    ) -> FoldSettings:
        aggregator = self.step.aggregator
        name = "weighting"
        given: Weighting = "clients"
        if isinstance(aggregator, SumAggregator):
            given = aggregator.weighting
        elif isinstance(aggregator, Weighs):
            name, given = "weighs", aggregator.weighs
        by = require_choice(f"{type(aggregator).__name__}.{name}", given, get_args(Weighting))
        summed = summed_payloads(self.step.sides)
        return FoldSettings(
            expected, Weights(by, discounts), summed, self.step.keeps_replies, rounding
        )

    def _bounds(
        self, params: Tensors, num_clients: int, most_weight: float, summand: float | None = None
    ) -> Bounds:
        """Return the range of numbers: ``most_weight`` is what all weights can sum to."""
        everything = {**self.step.model_params, **params}
        largest = min(largest_of(everything, num_clients), largest_summand(most_weight))
        bounds = Bounds(largest, widest=widest_of(everything))
        return bounds if summand is None else Bounds(largest, summand, bounds.widest)

    def _expected(
        self,
        params: Tensors,
        senders: Mapping[int, Sender],
        bounds: Bounds,
        measures: Collection[str] | None,
        compression: Compression,
    ) -> Expected:
        sides, shapes = self.client_sides.values(), self.step.expected()
        dtypes = {name: kind for side in sides for name, kind in side.dtypes.items()}
        compressed = compressed_shapes(self.client_sides, known_shapes(shapes))
        grown = per_example(self.client_sides)
        summed = measures is None  # then the server has made the replies itself, of means
        payloads = {
            name: ExpectedPayload(
                shapes.get(name),
                dtypes.get(name),
                per_example=name in grown,
                compressed=name in compressed,
                counts=() if summed else side.counts,
            )
            for side in sides
            for name in side.sends
        }
        shared = {name: torch.empty_like(value, device="meta") for name, value in params.items()}
        buffers = self.step.buffers
        return Expected(shared, senders, buffers, payloads, measures, bounds, compression)
