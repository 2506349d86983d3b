"""FedRep: exploiting shared representations for personalized federated learning.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078

FedPer's parts (the body b is shared, the head h_i is a client's own), trained one after the other
(Algorithm 1):

    h_i <- several epochs on the head, from h_i, at the received b
    b_i: the other epochs on the body, from b, at that head
    b <- b + eta_g sum_i (n_i / sum_j n_j) (b_i - b)

What stays, travels and is evaluated is as in FedPer (strategies/fedper.py). The first phase moves
the head alone, the second the body alone, whatever the optimizer: a frozen tensor has no gradient,
so that neither momentum nor Adam moves it. (FedDW's released code does the same only with PyTorch 2
or newer, and asks for 1.12: there ``zero_grad`` left zeros, on which Adam's momentum kept moving
the frozen head. What that is worth: docs/results/feddw.md.)
BatchNorm statistics move in both phases, for both are passes in train mode.

The paper takes many epochs for the head and one for the body. FedDW's released code takes 1 and 4,
head first, and the recipe has that: ``strategy.fedrep.head_epochs`` of ``local.epochs``.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from strategies.components.local_training_config import Phase
from strategies.components.tensor_selection import TensorSelector, named
from strategies.round.federated import FederatedStrategy, Slots


class FedRep(FederatedStrategy):
    """FedAvg's server over the body, for clients that train the head, then the body.

    They are ``FederatedClient(personal=FedRep.personal, options=...)`` with
    ``LocalTrainingConfig(epochs=5, phases=FedRep.phases)``.

    Attributes:
        personal: the tensors that stay at a client.
        phases: one epoch for the head, the others for the body.
    """

    personal: ClassVar[TensorSelector] = named("head.*")
    phases: ClassVar[tuple[Phase, ...]] = (Phase(named("head.*"), 1), Phase(named("body.*")))

    def __init__(self, **slots: Unpack[Slots]) -> None:
        super().__init__(**slots)
