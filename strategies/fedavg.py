"""FedAvg, FedAvg with other server optimizers, and the baselines Local and Centralised.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-efficient learning of deep networks
from decentralized data. AISTATS 2017. https://arxiv.org/abs/1602.05629

    y_i: E epochs of SGD from x on client i;   x <- x + eta_g sum_i (n_i / sum_j n_j) (y_i - x)

eta_g = 1 is the paper's method (the average of the models). FedAvgM, FedAdagrad, FedAdam and
FedYogi change only the server optimizer: see server_optimizers.py.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated, ClassVar

from fedhet.common.configured import Key, fields
from fedhet.common.kinds import Positive, Share
from fedhet.strategies.components.server_optimizers import SGD, Adagrad, Adam, Yogi
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts


class FedAvg(Method):
    """FedAvg (McMahan et al. 2017): mean of the clients' models, weighted by their example counts.
    The baseline of every comparison.
    """


class _OtherStep(Method):
    """FedAvg with another server optimizer, whose parameters are the method's."""

    replaces = frozenset({"server_optimizer"})
    requires = MappingProxyType({"strategy.server_optimizer": None})
    optimizer: ClassVar[type[SGD | Adagrad | Adam | Yogi]]

    def parts(self) -> Parts:
        """Step by the optimizer."""
        own = {name: getattr(self, name) for name in fields(self.optimizer).keys() - {"lr"}}
        return Parts(server_optimizer=self.optimizer(lr=self.server_lr, **own))


class FedAvgM(_OtherStep):
    """FedAvgM (Hsu et al. 2019): momentum at the server, which damps the swings of small or skewed
    cohorts. The steady step is eta_g / (1 - momentum), by default FedAvg's.
    """

    optimizer = SGD

    server_lr: Annotated[Positive, Key("server.lr")] = 0.1
    momentum: Share = 0.9
    """momentum of the mean update"""


class _AdaptiveStep(_OtherStep):
    """What FedAdagrad, FedAdam and FedYogi share.

    The mean update is divided by its running size, so a ``server_lr`` of 1 diverges.
    """

    server_lr: Annotated[Positive, Key("server.lr")] = 0.03
    beta1: Share = 0.9
    """decay of the first moment"""
    tau: Positive = 0.001
    """adaptivity: added to the root of the second moment"""


class FedAdagrad(_AdaptiveStep):
    """FedAdagrad (Reddi et al. 2021): Adagrad at the server, for sparse or very uneven gradients.
    The paper tunes server.lr and tau per task.
    """

    optimizer = Adagrad

    beta1: Share = 0.0
    """decay of the first moment"""


class FedAdam(_AdaptiveStep):
    """FedAdam (Reddi et al. 2021): Adam at the server, where FedAvg's steps are too small or swing.
    The paper tunes server.lr and tau per task.
    """

    optimizer = Adam

    beta2: Share = 0.99
    """decay of the second moment"""


class FedYogi(_AdaptiveStep):
    """FedYogi (Reddi et al. 2021): Yogi at the server: Adam with a second moment that grows slowly.
    The paper tunes server.lr and tau per task.
    """

    optimizer = Yogi

    beta2: Share = 0.99
    """decay of the second moment"""


class Local(Method):
    """Local (no federation): every client trains its own model and shares nothing; the lower
    bound that a federation must beat.

    All tensors are personal, so only metrics travel. The optimizer starts afresh every round:
    R rounds of E epochs of Adam are not R E epochs.
    """

    replaces = frozenset({"personal"})
    settings = MappingProxyType({"strategy.personal": "all", "evaluation.model": "clients"})


class Centralised(Method):
    """Centralised (no federation): one client has all examples; the gap to it is what heterogeneity
    costs.

    With plain SGD, R rounds of E epochs are R E epochs.
    """

    settings = requires = MappingProxyType({"clients": 1})
