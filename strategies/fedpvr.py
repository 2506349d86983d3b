"""FedPVR: on the effectiveness of partial variance reduction in federated learning.

Li, Schmidt, Alstrøm, Stich. CVPR 2023. https://arxiv.org/abs/2212.02191

Algorithm 1: SCAFFOLD's correction on S_svr (the last layers), plain SGD elsewhere:

    y <- y - eta_l (g(y) - c_i + c)     on S_svr                                   (line 8, eq. 6)
    y <- y - eta_l g(y)                 on the other tensors                       (line 9)
    c_i+ = c_i - c + (x - y_K) / (K eta_l)                                         (line 11)
    x <- (1 - eta_g) x + eta_g mean_i y_i;  c <- c + (1 / N) sum_i (c_i+ - c_i)    (lines 14, 15)

S_svr = every tensor is SCAFFOLD, S_svr = {} is FedAvg. Only the selected tensors' control variates
travel: 2 + 2 v / d models a round and client, v = |S_svr| numbers of d.

Where the paper's text differs: eq. 8 / line 14 lacks an eta_g; the printed S_svr := {j: p_j = 0}
reads p_j = 1; eq. 9 (c = mean c_i) equals line 15 only with full participation and zero start.
Where the released code differs: its ``start_layer`` counts named_parameters (16 for VGG-11: the 6
tensors of its classifier; 27 for ResNet-8: the classifier's 2), but its script passes 16 for any
network; and the uncorrected tensors of FedPVR alone have momentum .9, which the paper does not
mention (here local.momentum and local.momentum_layers).
"""

from __future__ import annotations

from typing import Unpack

from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.round.arguments import Slots
from fedhet.strategies.scaffold import ControlVariateClient, ControlVariateServer, Option


class FedPVR(FederatedStrategy):
    """SCAFFOLD's two halves on a layer selector.

    Args:
        layers: S_svr, e.g. ``"last:6"`` for VGG-11, ``"last:2"`` for ResNet-8; by default the
            classifier.
        option: how c_i is estimated, see :mod:`fedhet.strategies.scaffold`.
    """

    def __init__(
        self, layers: TensorSelector | str = "head.*", option: Option = "II", **slots: Unpack[Slots]
    ) -> None:
        slots.setdefault("aggregator", UniformMean())
        super().__init__(
            client_sides={"fedpvr": ControlVariateClient(layers, option, "fedpvr")},
            server_sides={"fedpvr": ControlVariateServer(layers, "fedpvr")},
            **slots,
        )
