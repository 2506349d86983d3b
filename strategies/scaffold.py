"""SCAFFOLD: stochastic controlled averaging for federated learning.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020. https://arxiv.org/abs/1910.06378

Local step (eq. 3):      y <- y - eta_l (g(y) - c_i + c)
After K steps (eq. 4):   option I   c_i+ = g_i(x), the gradient of the local loss at the received x
                         option II  c_i+ = c_i - c + (y_0 - y_K) / (K eta_l),   y_0 = x
Server (eq. 5):          x <- x + eta_g / |S| sum_{i in S} (y_i - x)
                         c <- c + (1 / N) sum_{i in S} (c_i+ - c_i),   N all clients, not |S|

c and all c_i start at zero, and again after a client lost its c_i. c travels down (d numbers),
c_i+ - c_i up (d). SCAFFOLD corrects all tensors, FedPVR the last ones; correcting none is FedAvg.

``lr_sum``, the sum of the step sizes that a tensor really took, stands for K eta_l. y_0 differs
from x if another method moves the start (FedALA). Option II takes the mean gradient from the
displacement, so it needs plain SGD. Option II-momentum is ours: with momentum m the j-th gradient
moves a tensor by eta_l (1 + m + ... + m^(K-j)), so the displacement over the sum of these is a
weighted mean of gradients. Option II's c_i includes weight decay and other methods' penalties;
option I's is the gradient of the task loss alone, in train mode, without augmentation. Clipping
acts on the corrected gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    Reply,
    ReplySum,
    ServerSide,
    Shapes,
    Tensors,
    subtract,
    zeros_like,
)
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

CONTROL_VARIATE = "control_variate"
DELTA = "control_variate_delta"
Option = Literal["I", "II", "II-momentum"]


class ControlVariateClient(ClientSide):
    """The client half of SCAFFOLD, on the selected tensors.

    Args:
        layers: the tensors that are corrected.
        option: how c_i+ is estimated; "I" takes one more pass over the data.
        method: "scaffold" or "fedpvr", for the keys in errors.
    """

    needs, sends = frozenset({CONTROL_VARIATE}), frozenset({DELTA})
    compressible = frozenset({CONTROL_VARIATE, DELTA})

    def __init__(self, layers: str, option: Option, method: str) -> None:
        self.key = f"strategy.{method}.option"
        self.option = option
        self.layers = TensorSelector(layers, f"strategy.{method}.layers")

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse personal tensors, and under option II momentum or Adam on corrected ones."""
        names = [name for name, _ in model.named_parameters()]
        corrected = list(shared) if self.layers.spec == "all" else self.layers.select(names)
        if personal := sorted(set(corrected) - set(shared)):
            raise ConfigError(
                f"{self.layers.key}={self.layers.spec} corrects {personal}, which stay at the "
                f"clients (strategy.personal): let {self.layers.key} select of {list(shared)}"
            )
        stateful = sorted(set(corrected) & set(optimizer.stateful(names)))
        summed = self.option == "II-momentum" and optimizer.momentum is not None
        if self.option != "I" and stateful and not summed:
            raise ConfigError(
                f"{self.key}={self.option} reads the gradient off SGD steps, but the local "
                f"optimizer takes others on {stateful}: set local.optimizer=sgd, local.momentum=0 "
                "(or local.momentum_layers to tensors that are not corrected), or "
                f"{self.key}=I, or with momentum II-momentum"
            )

    def begin(self, context: LocalContext) -> None:
        """Take c as received and c_i from the client state (zero before its first round)."""
        self.server = context.received[CONTROL_VARIATE]
        self.local = context.state.get(CONTROL_VARIATE) or zeros_like(self.server)
        self.shift = subtract(self.server, self.local)

    def correct(self, grads: Tensors, context: LocalContext) -> None:
        """Add c - c_i to the gradient."""
        for name, shift in self.shift.items():
            grads[name].add_(shift)

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep c_i+ in the client state and send c_i+ - c_i."""
        by_gradient = self.option == "I"
        new = self._from_gradient(context) if by_gradient else self._from_drift(context, summary)
        context.state[CONTROL_VARIATE] = new
        return {DELTA: subtract(new, self.local)}

    def after_sending(self, reply: Reply, state: dict[str, Tensors]) -> None:
        """Keep c_i plus the sent part of c_i+ - c_i, so that c stays the mean of all c_i."""
        if sent := reply.payloads[DELTA]:
            state[CONTROL_VARIATE] = {n: c + sent[n].to(c) for n, c in self.local.items()}

    def _from_drift(self, context: LocalContext, summary: LocalSummary) -> dict[str, Tensor]:
        return {
            name: (context.start[name] - context.params[name]) / reach - shift
            if (reach := summary.reach_of(name)) > 0.0
            else self.local[name]  # a tensor that no phase trains
            for name, shift in self.shift.items()
        }

    @torch.enable_grad()
    def _from_gradient(self, context: LocalContext) -> dict[str, Tensor]:
        model = copy.deepcopy(context.global_model).requires_grad_(True).train()
        size, of_all = context.batch_size, len(context.data)
        while of_all > size > 1 and of_all % size == 1:
            size += 1  # BatchNorm takes no batch of one example
        for inputs, labels in context.data.batches(size, generator=None, train=False):
            _, logits = model(inputs)
            part = len(labels) / of_all * context.loss(logits, labels)
            part.backward()  # type: ignore[no-untyped-call]
        params = dict(model.named_parameters())
        grads = {name: params[name].grad for name in self.shift}
        return {n: torch.zeros_like(params[n]) if g is None else g for n, g in grads.items()}


class ControlVariateServer(ServerSide):
    """The server half: keeps c on the selected tensors."""

    needs, sends = frozenset({DELTA}), frozenset({CONTROL_VARIATE})
    coupled_state, kept = frozenset({CONTROL_VARIATE}), (CONTROL_VARIATE,)

    def __init__(self, layers: str, method: str) -> None:
        self.layers = TensorSelector(layers, f"strategy.{method}.layers")
        self.control_variate: dict[str, Tensor] = {}

    def init(self, params: Tensors) -> None:
        """Start c at zero on the selected tensors; only ``all`` may select none."""
        names = params if self.layers.spec == "all" else self.layers.select(params)
        self.control_variate = zeros_like({n: params[n] for n in names})

    def broadcast(self, client_id: int) -> Payloads:
        """Send c."""
        return {CONTROL_VARIATE: self.control_variate}

    def expected(self) -> Shapes:
        """A delta has the names and shapes of c."""
        return {DELTA: {name: tuple(c.shape) for name, c in self.control_variate.items()}}

    def reduce(self, total: ReplySum, update: Tensors, cohort: Cohort) -> None:
        """c <- c + (1 / N) sum_i (c_i+ - c_i)."""
        change = total.payloads[DELTA]
        self.control_variate = {
            name: c + change[name] / cohort.num_clients for name, c in self.control_variate.items()
        }


class SCAFFOLD(Method):
    """SCAFFOLD (Karimireddy et al. 2020): control variates on every tensor correct the drift of the
    clients' steps. Needs plain SGD at the clients.
    """

    option: Option = "II"
    """how c_i is estimated: II (displacement) | II-momentum (the same under local.momentum) |
    I (gradient at the received model)"""

    def parts(self) -> Parts:
        """Add the two halves, and average the updates without weights."""
        return control_variates(self.name, "all", self.option)


def control_variates(method: str, layers: str, option: Option) -> Parts:
    """Return SCAFFOLD's halves on some of the tensors, as a method's parts."""
    return Parts(
        client_sides={method: ControlVariateClient(layers, option, method)},
        server_sides={method: ControlVariateServer(layers, method)},
        aggregator=UniformMean(),
    )
