"""FedGAMMA: federated learning with global sharpness-aware minimization.

Dai, Yang, Sun, Shen, Tian, Wang, Zhang. IEEE TNNLS 2023. https://doi.org/10.1109/TNNLS.2023.3304453

SCAFFOLD (scaffold.py) with FedSAM's gradient (fedsam.py):

    y <- y - eta_l (grad f_i(y + e) - c_i + c)          e = rho grad f_i(y) / ||grad f_i(y)||
    c_i+ = c_i - c + (x - y_K) / (K eta_l)

so c is the mean gradient at the perturbed points. The control variates do not perturb. rho = 0 is
SCAFFOLD. It is the same as ``strategy=[fedsam,scaffold]``. The released code (FL-Simulator, rho .1)
divides all clients' displacements by the first client's number of steps, here each has its own.
"""

from __future__ import annotations

from fedhet.strategies.fedsam import SharpnessAware
from fedhet.strategies.scaffold import SCAFFOLD


class FedGAMMA(SCAFFOLD):
    """FedGAMMA (Dai et al. 2023): SCAFFOLD's control variates with sharpness-aware steps, which
    then climb and descend along the global loss. Needs plain SGD at the clients.
    """

    replaces = frozenset({"optimizer"})

    sam: SharpnessAware = SharpnessAware()
