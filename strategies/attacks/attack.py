"""Attack: what a chosen client does beside its part in a method.

An attack is the last client half of a hostile client, so its ``upload`` comes after all others,
such as clipping. The clients are chosen before round 1 and stay the same; everything that an attack
draws follows from the run's seed. Attacks are for simulations: a recipe that has one must say
``attack.allow=true``, and a deployment refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedhet.common.errors import ConfigError, require_range
from fedhet.strategies.base import ClientData, ClientSide, Reply

_STREAM = 0xA77  # keeps the choice of clients independent of every other use of the run's seed


@dataclass(kw_only=True, eq=False)
class Attack(ClientSide):
    """The base of all attacks.

    Attributes:
        clients: which are hostile: ids, or a share of all in (0, 1), drawn by the seed.
        num_clients: N.
        seed: of the run.
        allow: must be true.
        hostile: ids of the hostile clients.
        benign: what the other hostile clients would honestly send this round, by client id; set by
            the client's process where the attack ``colludes``.
        white: what a white pixel is by channel (C,), None if inputs are no images; set likewise.
    """

    colludes: ClassVar[bool] = False  # whether it reads ``benign``
    needs_classes: ClassVar[bool] = False

    clients: list[int] | float  # builtins alone: subclasses resolve the hints in their modules
    num_clients: int
    seed: int = 0
    allow: bool = False

    def __post_init__(self) -> None:
        """Choose the hostile clients."""
        if not self.allow:
            raise ConfigError(
                "attack makes clients of this run hostile on purpose: set attack.allow=true, or "
                "attack=none"
            )
        self.hostile = hostile_clients(self.clients, self.num_clients, self.seed)
        self.benign: Callable[[], list[Reply]] = list
        self.white: Tensor | None = None

    def check_method(self, payloads: Collection[str], *, num_classes: int) -> None:
        """Refuse, before round 1, a method or task that the attack cannot act on.

        Args:
            payloads: that the method's clients send.
            num_classes: of the task; 0 if it has none.
        """
        if self.needs_classes and not num_classes:
            raise ConfigError(
                f"attack {type(self).__name__} changes classes, and the task has none: choose "
                "another attack"
            )

    def data(self, data: ClientData) -> ClientData:
        """Return the examples that a hostile client trains on."""
        return data


def hostile_clients(clients: list[int] | float, num_clients: int, seed: int) -> frozenset[int]:
    """Return the hostile clients' ids: those that are named, or a share drawn by the seed."""
    if num_clients < 1:
        raise ConfigError("attack needs the number of clients: set clients, which is 0")
    if not isinstance(clients, Sequence):
        share = require_range("attack.clients", clients, high=1.0, open_low=True, open_high=True)
        count = max(1, int(share * num_clients + 0.5))
        order = np.random.default_rng([_STREAM, seed]).permutation(num_clients)
        return frozenset(int(client) for client in order[:count])
    found = frozenset(int(str(client)) for client in clients)
    if not found or len(found) != len(clients) or not found <= set(range(num_clients)):
        raise ConfigError(
            f"attack.clients={list(clients)} is not allowed: it must be ids from 0 to "
            f"{num_clients - 1}, at least one and each once, or a share in (0, 1)"
        )
    return found
