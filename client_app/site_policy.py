"""The doors at which a client obeys its site's policy.

The node config names the file (``policy="/path"``), or FEDHET_POLICY in the environment of the
site's executor; a simulation's clients have the recipe's ``site.policy``.

    SitePolicy.admitting        every message, before any of the site's data are read
    PolicySide, ``evaluated``   every reply, before it leaves

The client obeys, and so does whoever runs fedhet's code as it is. Against other code only
``bundles`` and ``own_code`` help, which the site's executor enforces
(common/flower/fork_executor.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from omegaconf import DictConfig, OmegaConf

from fedhet.client_app.policy import (
    Policy,
    forbidden_by_message,
    forbidden_by_run,
    forbidden_payloads,
    line,
    matches,
    policy_of,
    stamp_of,
)
from fedhet.common.decisions import ANSWERS, CONFUSION, Counts, SiteCounts
from fedhet.common.errors import ConfigError
from fedhet.conf import compose_overrides
from fedhet.strategies.base import STATE_LOST, ClientData, ClientSide, Payloads, Reply
from fedhet.strategies.wire.records import COLUMNS, METRICS, record_in, to_tensors

POLICY = "policy"  # of the node config; the name of the client's last side, too
ENVIRONMENT = "FEDHET_POLICY"
_ALWAYS = {"partition-id", "num-examples", "num-steps", "lr-sum", STATE_LOST}


class PolicyError(ConfigError):
    """A site's policy forbids what a message asks for; the message names the site and the rule."""


class NamedClasses(Protocol):
    """A task, as far as it is asked here."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their labels."""


class SiteClient(Protocol):
    """A client, as far as it is asked here."""

    data: ClientData
    held_out: ClientData | None


@dataclass(frozen=True)
class SitePolicy:
    """The policy of one site, and which client of the run the site is."""

    rules: Policy
    client_id: int

    @classmethod
    def admitting(
        cls, message: Message, context: Context, words: tuple[str, ...]
    ) -> SitePolicy | None:
        """Return the policy of the site that a message has come to; None without one.

        Raises:
            PolicyError: if the policy forbids the message; none of the site's data are read.
        """
        recipe = compose_overrides(words)
        client_id = int(context.node_config.get("partition-id", -1))
        if (path := _path(context, recipe, client_id)) is None:
            return None
        stamp = stamp_of(path)
        found = cls(policy_of(path, stamp), client_id)
        folder = str(context.node_config.get("data-folder", ""))
        lines = [
            *forbidden_by_run(path, stamp, words, folder),
            *forbidden_by_message(found.rules, message, recipe),
        ]
        if lines:
            raise found.error("; ".join(lines))
        return found

    def error(self, what: str) -> PolicyError:
        """Return the error that names the site and what it forbids."""
        client = f"client {self.client_id}"
        name = f"{self.rules.site} ({client})" if self.rules.site else client
        return PolicyError(f"the policy of {name} forbids {what}")

    def side(self, data: ClientData, held_out: ClientData | None, task: NamedClasses) -> PolicySide:
        """Return the last side of the site's client, which looks through what it sends."""
        return PolicySide(self, data, held_out, task)

    def evaluated(self, reply: Message, client: SiteClient, task: NamedClasses) -> Message:
        """Return the reply to an evaluation without the numbers that stay here."""
        side = self.side(client.data, client.held_out, task)
        found = record_in(reply.content, METRICS, MetricRecord) or MetricRecord()
        kept = {name: v for name, v in found.items() if side.may_leave(name, evaluated=True)}
        if kept.keys() <= _ALWAYS:
            raise self.error(line("an evaluation", self.rules, "metrics", "min_examples"))
        reply.content = RecordDict({METRICS: MetricRecord(kept)})
        return reply

    def with_columns(self, reply: Message) -> Message:
        """Return the reply with the statistics of a table's columns, if they are of enough rows."""
        if (record := record_in(reply.content, COLUMNS, ArrayRecord)) is not None:
            found = to_tensors(record)
            counts = [int(count) for count in found["counts"] if count > 0]
            self.require_examples(COLUMNS, min([int(found["rows"]), *counts]))
        return reply

    def counted(self, counts: SiteCounts) -> dict[str, Counts]:
        """Return the counts of a confusion matrix without classes of too few examples."""
        by_class = counts[ANSWERS].sum(axis=1, keepdims=True)
        self.require_examples(CONFUSION, int(by_class.max()))
        return {n: one * (by_class >= self.rules.min_examples) for n, one in counts.items()}

    def require_examples(self, what: str, count: int) -> None:
        """Refuse to send statistics of fewer examples than ``min_examples``."""
        if count < self.rules.min_examples:
            raise self.error(line(f"{what} of {count} examples", self.rules, "min_examples"))


def _path(context: Context, recipe: DictConfig, client_id: int) -> Path | None:
    """Return the file of a node's policy."""
    path: Any = context.node_config.get(POLICY) or os.environ.get(ENVIRONMENT)
    if not path and recipe.runtime.simulation:
        simulated = recipe.site.policy
        path = simulated.get(client_id) if OmegaConf.is_dict(simulated) else simulated
    return Path(str(path)).expanduser() if path else None


class PolicySide(ClientSide):
    """The door out of the site: refuses payloads, and takes out numbers, that must not leave."""

    def __init__(
        self,
        policy: SitePolicy,
        data: ClientData,
        held_out: ClientData | None,
        task: NamedClasses,
    ) -> None:
        self.policy, self.rules = policy, policy.rules
        self.data, self.evaluated_on = data, data if held_out is None else held_out
        self.task = task

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply without the numbers that stay here."""
        if lines := list(forbidden_payloads(self.rules, reply.payloads)):
            raise self.policy.error("; ".join(lines))
        kept = {name: value for name, value in reply.metrics.items() if self.may_leave(name)}
        return replace(reply, metrics=kept)

    def may_leave(self, name: str, *, evaluated: bool = False) -> bool:
        """Return whether a number may leave."""
        if name in _ALWAYS:
            return True
        on_test = name.startswith("personal-test-")  # of a simulation, which no site has
        evaluated |= name.startswith(("received-", "personal-"))
        data = self.evaluated_on if evaluated else self.data
        enough = on_test or self._count(data, name.partition("/")[2]) >= self.rules.min_examples
        return enough and matches(name, self.rules.metrics)

    def _count(self, data: ClientData, class_name: str) -> int:
        """Return how many examples a number describes; 0 if its class is not counted."""
        if not class_name or self.rules.min_examples == 1:
            return len(data)
        try:
            counts = data.class_counts()
        except ConfigError:  # a segmentation's examples have several classes
            return 0
        return dict(zip(self.task.class_names, counts, strict=True)).get(class_name, 0)
