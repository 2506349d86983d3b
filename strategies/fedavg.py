"""FedAvg, FedAvg with other server optimizers, and the baselines Local and Centralised.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-efficient learning of deep networks
from decentralized data. AISTATS 2017. https://arxiv.org/abs/1602.05629

    y_i: E epochs of SGD from x on client i;   x <- x + eta_g sum_i (n_i / sum_j n_j) (y_i - x)

eta_g = 1 is the paper's method (the average of the models). FedAvgM, FedAdagrad, FedAdam and
FedYogi change only the server optimizer: see server_optimizers.py.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from fedhet.strategies.components import server_optimizers
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.round.arguments import Slots, refuse_slot
from fedhet.strategies.round.registration import FederationConfig


class FedAvg(FederatedStrategy):
    """Every slot at its default: weighted mean, server SGD with eta_g = 1."""


class FedAvgM(FederatedStrategy):
    """FedAvg with server momentum (Hsu, Qi, Brown 2019)."""

    def __init__(self, momentum: float = 0.9, lr: float = 0.1, **slots: Unpack[Slots]) -> None:
        refuse_slot(self, "server_optimizer", slots)
        slots["server_optimizer"] = server_optimizers.SGD(lr, momentum)
        super().__init__(**slots)


class FedAdagrad(FederatedStrategy):
    """FedAvg with Adagrad at the server (Reddi et al. 2021)."""

    def __init__(self, lr: float = 0.03, tau: float = 1e-3, **slots: Unpack[Slots]) -> None:
        refuse_slot(self, "server_optimizer", slots)
        slots["server_optimizer"] = server_optimizers.Adagrad(lr, tau=tau)
        super().__init__(**slots)


class FedAdam(FederatedStrategy):
    """FedAvg with Adam at the server (Reddi et al. 2021)."""

    def __init__(self, lr: float = 0.03, tau: float = 1e-3, **slots: Unpack[Slots]) -> None:
        refuse_slot(self, "server_optimizer", slots)
        slots["server_optimizer"] = server_optimizers.Adam(lr, tau=tau)
        super().__init__(**slots)


class FedYogi(FederatedStrategy):
    """FedAvg with Yogi at the server (Reddi et al. 2021)."""

    def __init__(self, lr: float = 0.03, tau: float = 1e-3, **slots: Unpack[Slots]) -> None:
        refuse_slot(self, "server_optimizer", slots)
        slots["server_optimizer"] = server_optimizers.Yogi(lr, tau=tau)
        super().__init__(**slots)


class Local(FederatedStrategy):
    """Baseline without federation: every client trains its own model on its own examples.

    All tensors are personal (``FederatedClient(personal=Local.personal)``), so only metrics travel.
    The optimizer starts afresh every round: R rounds of E epochs of Adam are not R E epochs.
    """

    personal: ClassVar[TensorSelector] = TensorSelector("all")


class Centralised(FederatedStrategy):
    """Upper-bound baseline: centralised training, that is FedAvg with one client (``clients=1``).

    With plain SGD, R rounds of E epochs are R E epochs.
    """

    def __init__(self, **slots: Unpack[Slots]) -> None:
        slots.setdefault("federation", FederationConfig(num_clients=1))
        super().__init__(**slots)
