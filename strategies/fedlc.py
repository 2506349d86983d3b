"""FedLC and logit adjustment: losses that weigh a client's classes by how many examples it has.

FedLC: federated learning with label distribution skew via logits calibration. Zhang, Li, Li, Xu,
Wu, Ding, Wu. ICML 2022. https://arxiv.org/abs/2209.00189

Logit adjustment: long-tail learning via logit adjustment. Menon, Jayasumana, Rawat, Jain, Veit,
Kumar. ICLR 2021. https://arxiv.org/abs/2007.07314. With tau = 1 it is the balanced softmax of Ren
et al. (NeurIPS 2020, https://arxiv.org/abs/2007.10740).

A client with n_c examples of class c trains on the task's loss of other logits than the model's:

    L(y) = CE(z + s, label)         z the logits of an example
    s_c  = - tau n_c^(-1/4)         FedLC (eq. 8)
    s_c  = tau log n_c              logit adjustment

so that rare classes need a larger margin. A class that the client lacks gets no probability, and no
gradient. tau = 0 is FedAvg. The shifts are for training alone: the model predicts by z. FedRoD
trains its shared head on the balanced softmax, too (fedrod.py).

Where FedLC's paper and code differ: eq. 8 leaves the true class out of the softmax's denominator,
which makes the loss unbounded below; code of others does not (FedDecorr's repository, tau .1;
Flower's baseline, .5; fluke). The loss here and its gradient are equal to these
repositories' (FedDecorr's, fluke's) to rounding; the paper's text was not at hand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, LocalContext, Step
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts


class ShiftedLogitsClient(ClientSide):
    """Adds tau times ``shift(n)`` to the logits that the loss reads.

    Args:
        tau: its weight.
        shift: of class counts (C,); -inf for a class without examples.
        method: for errors.
    """

    by_class = True

    def __init__(self, tau: float, shift: Callable[[Tensor], Tensor], method: str) -> None:
        self.tau, self.form, self.method = tau, shift, method

    def begin(self, context: LocalContext) -> None:
        """Count the classes."""
        if self.tau > 0.0:
            like = next(iter(context.params.values()))
            counts = torch.tensor(context.data.class_counts()).to(like)
            self.shift = self.tau * self.form(counts)
            self._require_masking(context)

    def _require_masking(self, context: LocalContext) -> None:
        """Refuse a loss that cannot take the logit -inf of a class that the client lacks."""
        held = self.shift.isfinite().nonzero().flatten()
        if not context.loss(self.shift.expand(len(held), -1), held).isfinite():
            raise ConfigError(
                f"strategy={self.method} gives a class that a client lacks the logit -inf, and "
                "task.loss is then not finite (does it smooth labels?): choose another task.loss"
            )

    def penalty(self, step: Step) -> Tensor | None:
        """Return the term that turns the task's loss into that of the shifted logits."""
        if self.tau == 0.0:
            return None
        loss, labels = step.context.loss, step.labels
        return loss(step.logits + self.shift, labels) - loss(step.logits, labels)


class FedLC(Method):
    """FedLC (Zhang et al. 2022): calibrates the logits in training by how many examples of each
    class a client has; against label skew.
    """

    replaces = frozenset({"loss"})

    tau: NotNegative = 1.0
    """weight of the calibration; 0 is FedAvg. FedDecorr's code: .1"""

    def parts(self) -> Parts:
        """Calibrate the clients' losses."""
        side = ShiftedLogitsClient(self.tau, lambda counts: -counts.pow(-0.25), self.name)
        return Parts(client_sides={self.name: side})


class LogitAdjustment(Method):
    """Logit adjustment (Menon et al. 2021): adds the log of a client's class counts to its logits
    in training, so that the model does not learn its label skew; tau = 1 is the balanced softmax.
    """

    name = "logit_adjustment"
    replaces = frozenset({"loss"})

    tau: NotNegative = 1.0
    """weight of the log counts; 1 is the balanced softmax, 0 is FedAvg"""

    def parts(self) -> Parts:
        """Adjust the clients' losses."""
        return Parts(client_sides={self.name: ShiftedLogitsClient(self.tau, torch.log, self.name)})
