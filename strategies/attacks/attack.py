"""Attack: what a chosen client does beside its part in a method.

An attack is the last client half of a hostile client, so its ``upload`` comes after all others,
such as clipping. The clients are chosen before round 1 and stay the same; everything that an attack
draws follows from the run's seed. Attacks are for simulations: a recipe that has one must say
``attack.allow=true``, and a deployment refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from torch import Tensor

from fedhet.common.configured import Option, Refers
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Inside, Seed, Whole
from fedhet.strategies.base import ClientData, ClientSide, Reply

_STREAM = 0xA77  # keeps the choice of clients independent of every other use of the run's seed


class Attack(Option, ClientSide):
    """The base of all attacks.

    Attributes:
        hostile: ids of the hostile clients.
        benign: what the other hostile clients would honestly send this round, by client id; set by
            the client's process.
        white: what a white pixel is by channel (C,), None if inputs are no images; set likewise.
    """

    group = "attack"
    needs_classes: ClassVar[bool] = False

    clients: list[Whole] | Inside = 0.2
    """which are hostile: ids such as [0,3], or a share of all, drawn by the seed"""
    allow: bool = False
    """true: I know that this run has hostile clients"""
    num_clients: Annotated[Whole, Refers("${clients}")]
    """N, the number of clients"""
    seed: Annotated[Seed, Refers("${seed}")] = 0
    """seed of the run"""

    def __init__(self, **given: Any) -> None:
        """Choose the hostile clients."""
        super().__init__(**given)
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

        ``payloads`` are those of the method's clients; ``num_classes`` is 0 if the task has none.
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
        count = max(1, int(clients * num_clients + 0.5))
        order = np.random.default_rng([_STREAM, seed]).permutation(num_clients)
        return frozenset(int(client) for client in order[:count])
    found = frozenset(int(str(client)) for client in clients)
    if not found or len(found) != len(clients) or not found <= set(range(num_clients)):
        raise ConfigError(
            f"attack.clients={list(clients)} is not allowed: it must be ids from 0 to "
            f"{num_clients - 1}, at least one and each once, or a share in (0, 1)"
        )
    return found
