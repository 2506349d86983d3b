"""What the replies of a round must be, made of recipe, registration and method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fedhet.strategies.base import ClientSide, Tensors
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.modes.secure.aggregation import SecAggPlus
from fedhet.strategies.round.chosen import Chosen
from fedhet.strategies.round.client_metrics import ClientMetrics
from fedhet.strategies.round.exact_sum import largest_summand
from fedhet.strategies.round.registration import ClientRegistry
from fedhet.strategies.round.reply_fold import FoldRule, Limits
from fedhet.strategies.round.server_step import ServerStep
from fedhet.strategies.wire.client_versions import ClientVersions
from fedhet.strategies.wire.compression import Compression


@dataclass(frozen=True)
class Rules:
    """Makes the rule of a round's replies.

    Attributes:
        step: the server's.
        client_sides: the methods' client halves, by name.
        options: of local training; None: steps are not checked.
        metrics: that clients may report of evaluations.
        secure: aggregation; None: every reply is seen.
        compression: of what the clients send.
    """

    step: ServerStep
    client_sides: Mapping[str, ClientSide]
    options: LocalTrainingConfig | None
    metrics: ClientMetrics
    secure: SecAggPlus | None
    compression: Compression

    def of_round(
        self,
        params: Tensors,
        registry: ClientRegistry,
        versions: ClientVersions,
        chosen: Chosen,
        round: int,
        lr: Mapping[int, float],
    ) -> FoldRule:
        """Return the rule.

        Args:
            params: as they were sent, buffers included.
            registry: what the clients have registered.
            versions: of the client states.
            chosen: the round's clients.
            round: t.
            lr: eta_l that they were told, by id.
        """
        cohort, size, step = chosen.clients, len(registry), self.step
        if self.secure is not None:
            most = float(self.secure.max_examples * len(cohort))
            limits = dict.fromkeys(cohort, Limits())
            rule = step.fold_rule(params, self.client_sides, lr, size, most, limits)
            # the server makes these replies itself, of what it cannot look into
            return replace(rule, expected=replace(rule.expected, lr={}, measures=None))
        options, examples = self.options, registry.num_examples
        steps = {i: options.max_steps(examples[i]) if options else None for i in cohort}
        limits = {i: Limits(examples[i], steps[i], versions.not_lost(i)) for i in cohort}
        most = float(len(cohort))
        rule = step.fold_rule(params, self.client_sides, lr, size, most, limits)
        measures = {*(rule.expected.measures or ()), *self.metrics.in_train_replies}
        return replace(
            rule,
            expected=replace(
                rule.expected,
                summand=largest_summand(most),
                measures=measures,
                compression=self.compression,
                rounds=chosen.rounds(round),
            ),
            sum=replace(rule.sum, discounts=chosen.discounts),
        )
