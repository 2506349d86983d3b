"""FedRep: exploiting shared representations for personalized federated learning.

Collins, Hassani, Mokhtari, Shakkottai. ICML 2021. https://arxiv.org/abs/2102.07078

FedPer's parts (the body b is shared, the head h_i is a client's own), trained one after the other
(Algorithm 1):

    h_i <- several epochs on the head, from h_i, at the received b
    b_i: the other epochs on the body, from b, at that head
    b <- b + eta_g sum_i (n_i / sum_j n_j) (b_i - b)

What stays, travels and is evaluated is as in FedPer (fedper.py). A frozen tensor has no gradient,
so neither momentum nor Adam moves it. BatchNorm statistics move in both phases: both are passes in
train mode.

The paper takes many epochs for the head and one for the body, FedDW's released code 1 and 4, as the
recipe does: ``strategy.fedrep.head_epochs`` of ``local.epochs``.
"""

from __future__ import annotations

from typing import ClassVar

from fedhet.strategies.components.local_training_config import Phase
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.federated import FederatedStrategy


class FedRep(FederatedStrategy):
    """FedAvg's server over the body, for clients that train the head, then the body.

    They are ``FederatedClient(personal=FedRep.personal, options=...)`` with
    ``LocalTrainingConfig(epochs=5, phases=FedRep.phases)``.
    """

    personal: ClassVar[TensorSelector] = TensorSelector("head.*")
    phases: ClassVar[tuple[Phase, ...]] = (
        Phase(TensorSelector("head.*"), 1),
        Phase(TensorSelector("body.*")),
    )
