"""FedAvg: communication-efficient learning of deep networks from decentralized data.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. AISTATS 2017. https://arxiv.org/abs/1602.05629

    y_i: E epochs of SGD from x on client i;   x <- x + eta_g sum_i (n_i / sum_j n_j) (y_i - x)

eta_g = 1 is the paper's method (the average of the models). FedAvgM (server momentum) and the
adaptive server optimisers change only the server optimiser: see server_optimizers.py.
"""

from __future__ import annotations

from typing import Unpack

from strategies.components import server_optimizers
from strategies.round.federated import FederatedStrategy, Slots


class FedAvg(FederatedStrategy):
    """Every slot at its default: weighted mean, server SGD with eta_g = 1."""

    def __init__(self, **slots: Unpack[Slots]) -> None:
        super().__init__(**slots)


class FedAvgM(FederatedStrategy):
    """FedAvg with server momentum (Hsu, Qi, Brown 2019)."""

    def __init__(self, momentum: float = 0.9, lr: float = 0.1, **slots: Unpack[Slots]) -> None:
        slots["server_optimizer"] = server_optimizers.SGD(lr, momentum)
        super().__init__(**slots)


class FedAdagrad(FederatedStrategy):
    """FedAvg with Adagrad at the server (Reddi et al. 2021)."""

    def __init__(self, lr: float = 0.03, tau: float = 1e-3, **slots: Unpack[Slots]) -> None:
        slots["server_optimizer"] = server_optimizers.Adagrad(lr, tau=tau)
        super().__init__(**slots)


class FedAdam(FederatedStrategy):
    """FedAvg with Adam at the server (Reddi et al. 2021)."""

    def __init__(self, lr: float = 0.03, tau: float = 1e-3, **slots: Unpack[Slots]) -> None:
        slots["server_optimizer"] = server_optimizers.Adam(lr, tau=tau)
        super().__init__(**slots)


class FedYogi(FederatedStrategy):
    """FedAvg with Yogi at the server (Reddi et al. 2021)."""

    def __init__(self, lr: float = 0.03, tau: float = 1e-3, **slots: Unpack[Slots]) -> None:
        slots["server_optimizer"] = server_optimizers.Yogi(lr, tau=tau)
        super().__init__(**slots)
