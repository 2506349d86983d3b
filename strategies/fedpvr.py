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

from typing import Annotated

from fedhet.common.configured import Refers
from fedhet.common.kinds import Selector
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.scaffold import Option, control_variates


class FedPVR(Method):
    """FedPVR (Li et al. 2023): SCAFFOLD's control variates on the last layers only, which gives
    most of its gain against label skew for few more bytes.
    """

    layers: Annotated[Selector, Refers("last:${task.classifier_tensors}")] = "head.*"
    """S_svr: all | none | last:N | first:N | patterns; by default the model's classifier (VGG-11
    last:6, ResNet-8 last:2)"""
    option: Option = "II"
    """how c_i is estimated: II (displacement) | II-momentum (the same under local.momentum) |
    I (gradient at the received model)"""

    def parts(self) -> Parts:
        """Add SCAFFOLD's halves on the selected tensors."""
        return control_variates(self.name, self.layers, self.option)
