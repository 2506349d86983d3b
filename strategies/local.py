"""Local: every client for itself, the accuracy that a federation has to beat at a client.

The baseline of every paper on personalised methods, and in FedDW's released code:

    y_i: E epochs a round of the local optimizer from where client i was, on its own examples

All tensors are personal, so nothing travels but metrics. A client's own model is evaluated
(``evaluation.model=clients``). The optimizer starts afresh every round, as in every method: with
Adam, R rounds of E epochs are not R E epochs at one go.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from strategies.components.tensor_selection import TensorSelector, all_tensors
from strategies.round.federated import FederatedStrategy, Slots


class Local(FederatedStrategy):
    """A server of nothing: its clients are ``FederatedClient(personal=Local.personal)``.

    Attributes:
        personal: the tensors that stay at a client: all.
    """

    personal: ClassVar[TensorSelector] = all_tensors()

    def __init__(self, **slots: Unpack[Slots]) -> None:
        super().__init__(**slots)
