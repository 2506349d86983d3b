"""FedPer: federated learning with personalization layers.

Arivazhagan, Aggarwal, Singh, Choudhary. 2019. https://arxiv.org/abs/1912.00818

A model is a body and a head. The body is FedAvg's; the head is a client's own (Algorithms 1, 2):

    (b_i, h_i): E epochs of the local optimizer from (b, h_i), on both together
    b <- b + eta_g sum_i (n_i / sum_j n_j) (b_i - b)

The head never leaves the client; the body travels, its BatchNorm statistics with it, and so a bit
less than in FedAvg. There is no global model, so that the clients' own are evaluated
(``evaluation.model=clients``), each as it was after its last training. Without personal tensors
(``strategy.personal=none``) it is FedAvg, with all of them Local.

FedDW's released code keeps the whole last local model and overwrites its body, which is the same.
It averages heads, too, and nobody reads them. It scores the mean of all clients' models on the
global test set, with those that have not trained yet; here they do not count.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from strategies.components.tensor_selection import TensorSelector, named
from strategies.round.federated import FederatedStrategy, Slots


class FedPer(FederatedStrategy):
    """FedAvg's server over the body: its clients are ``FederatedClient(personal=FedPer.personal)``.

    Attributes:
        personal: the tensors that stay at a client.
    """

    personal: ClassVar[TensorSelector] = named("head.*")

    def __init__(self, **slots: Unpack[Slots]) -> None:
        super().__init__(**slots)
