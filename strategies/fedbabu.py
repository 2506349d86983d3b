"""FedBABU: toward enhanced representation for federated image classification.

Oh, Kim, Yun. ICLR 2022. https://arxiv.org/abs/2106.06042

A model is a body and a head. The head stays as it was initialised, the same at all clients, and
only the body is trained and averaged (Algorithm 1):

    b_i: E epochs on the body alone, from b, at the initial head
    b <- b + eta_g sum_i (n_i / sum_j n_j) (b_i - b)

The head does not travel: server and clients initialise it from the run's seed. So the global model
exists, and is evaluated as it is. The paper personalises it afterwards by a few epochs on the whole
model at every client (its code: 5): ``evaluation.clients=true evaluation.finetune_epochs=5``.

FedDW's released code is without that fine-tuning, as the recipe is. It sends the head, too.
"""

from __future__ import annotations

from typing import ClassVar, Unpack

from strategies.components.local_training_config import Phase
from strategies.components.tensor_selection import TensorSelector, named
from strategies.round.federated import FederatedStrategy, Slots


class FedBABU(FederatedStrategy):
    """FedAvg's server over the body, for clients that train the body alone.

    They are ``FederatedClient(personal=FedBABU.personal, options=...)`` with
    ``LocalTrainingConfig(epochs=5, phases=FedBABU.phases)``, and start from the same head.

    Attributes:
        personal: the tensors that stay at a client.
        phases: all epochs for the body.
    """

    personal: ClassVar[TensorSelector] = named("head.*")
    phases: ClassVar[tuple[Phase, ...]] = (Phase(named("body.*")),)

    def __init__(self, **slots: Unpack[Slots]) -> None:
        super().__init__(**slots)
