"""FedBuff and FedAsync: rounds that wait for nobody. The equations are in modes/asynchronous.py.

A simulated ``system`` (modes/systems.py) says who finishes when; without one, replies count as
they arrive from real clients (modes/live_clients.py). Both methods go with every method whose
aggregator reads the mean of the updates, such as ``strategy=[fedpvr,fedbuff]``: penalties,
corrections and payloads are those of the version that a client started from.

Clients start uniformly among the idle ones; who has finished does not start again in the same step.
FedAsync's regularisation towards the received model is FedProx's: ``strategy=[fedprox,fedasync]``.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated

from fedhet.common.configured import Key
from fedhet.common.kinds import Positive
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.method import Method
from fedhet.strategies.modes.asynchronous import Asynchronous
from fedhet.strategies.parts import Parts


class FedBuff(Method):
    """FedBuff (Nguyen et al. 2022): asynchronous; the server steps when a buffer of replies is full
    and waits for nobody; stale replies weigh less. On a simulated clock (system=...), or between
    real sites (system=none).

    ``participation`` is the share of the clients that train at any time.
    """

    replaces = frozenset({"asynchronous"})
    settings = MappingProxyType({"system": "lognormal"})

    asynchronous: Asynchronous = Asynchronous(buffer=5)

    def parts(self) -> Parts:
        """Step by the plain mean of a buffer."""
        return Parts(aggregator=UniformMean(), asynchronous=self.asynchronous)


class FedAsync(Method):
    """FedAsync (Xie et al. 2019): asynchronous; every reply is a step towards that client's model,
    smaller if it is stale. On a simulated clock (system=...), or between real sites (system=none).

    ``server_lr`` is the paper's alpha. The default is a hinge with exponent .5 and threshold 4; the
    paper's hinge has exponent 10 (``strategy.asynchronous.exponent=10``), its polynomial .5.
    """

    replaces = frozenset({"asynchronous"})
    settings = MappingProxyType({"system": "lognormal"})

    server_lr: Annotated[Positive, Key("server.lr")] = 0.6
    asynchronous: Asynchronous = Asynchronous(buffer=1, discount="hinge", towards_model=True)

    def parts(self) -> Parts:
        """Step by one reply."""
        return Parts(aggregator=UniformMean(), asynchronous=self.asynchronous)
