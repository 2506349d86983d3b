"""FedBuff and FedAsync: rounds that wait for nobody. The equations are in modes/asynchronous.py.

A simulated ``system`` (modes/systems.py) says who finishes when; without one, replies count as
they arrive from real clients (modes/live_clients.py). Both methods go with every method whose
aggregator reads the mean of the updates, such as ``strategy=[fedpvr,fedbuff]``: penalties,
corrections and payloads are those of the version that a client started from.

Clients start uniformly among the idle ones; who has finished does not start again in the same step.
FedAsync's regularisation towards the received model is FedProx's: ``strategy=[fedprox,fedasync]``.
"""

from __future__ import annotations

from typing import Unpack

from fedhet.strategies.components import server_optimizers
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.modes.asynchronous import Asynchronous, Discount
from fedhet.strategies.round.arguments import Slots, refuse_slot


class FedBuff(FederatedStrategy):
    """The plain mean of K replies, discounted by (1 + tau)^-a."""

    def __init__(self, buffer: int = 5, exponent: float = 0.5, **slots: Unpack[Slots]) -> None:
        slots.setdefault("aggregator", UniformMean())
        refuse_slot(self, "asynchronous", slots)
        slots["asynchronous"] = Asynchronous(buffer, "polynomial", exponent)
        super().__init__(**slots)


class FedAsync(FederatedStrategy):
    """Every reply is a step of ``alpha`` s(tau) towards the client's model."""

    def __init__(
        self,
        alpha: float = 0.6,
        discount: Discount = "hinge",
        exponent: float = 0.5,
        threshold: float = 4.0,
        **slots: Unpack[Slots],
    ) -> None:
        slots.setdefault("aggregator", UniformMean())
        slots.setdefault("server_optimizer", server_optimizers.SGD(alpha))
        refuse_slot(self, "asynchronous", slots)
        slots["asynchronous"] = Asynchronous(1, discount, exponent, threshold, towards_model=True)
        super().__init__(**slots)
