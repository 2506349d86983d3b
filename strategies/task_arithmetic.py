"""Task arithmetic: editing models with task arithmetic.

Ilharco, Ribeiro, Wortsman, Gururangan, Schmidt, Hajishirzi, Farhadi. ICLR 2023.
https://arxiv.org/abs/2212.04089

With x the model from which all M clients start, tau_i = y_i - x is client i's task vector, and
the merged model (section 2, "learning via addition") is

    x + scale sum_i tau_i

scale = 1 / M is the plain mean of the models. The paper takes one scale for all tasks, by held-out
examples; .3 to .4 suits eight tasks.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor

from fedhet.common.kinds import Positive
from fedhet.strategies.base import ReplySum, Tensors, Weighting
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts


class ScaledSum:
    """scale sum_i u_i."""

    weighting: Weighting = "clients"

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, params: Tensors, total: ReplySum) -> dict[str, Tensor]:
        """Return the aggregate."""
        factor = self.scale * len(total.replies)  # ``update`` is the mean
        return {name: factor * value for name, value in total.update.items()}


class TaskArithmetic(Method):
    """Task arithmetic (Ilharco et al. 2023): one round; adds the clients' updates, scaled. Merging
    of models that were fine-tuned from one.
    """

    name = "task_arithmetic"
    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.aggregator": None})

    scale: Positive = 0.3
    """factor of the sum of the updates; 1 / clients is their mean"""

    def parts(self) -> Parts:
        """Add the updates."""
        return Parts(aggregator=ScaledSum(self.scale))
