"""FedDyn: federated learning based on dynamic regularization.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. ICLR 2021. https://arxiv.org/abs/2111.04263

A client's objective changes from round to round so that its minimum moves to the global one
(Algorithm 1). With h_i the sum of client i's updates y_i - x over the rounds that it took part in:

    local objective     f_i(y) + (alpha / 2) ||y - x||^2 + alpha <h_i, y - x>
    after training      h_i <- h_i + (y_i - x)
    server              H <- H + (|S| / N) Delta         Delta = (1 / |S|) sum_{i in S} (y_i - x)
                        x <- x + Delta + H

so H is the mean of h_i over all N clients. h_i and H start at zero; h_i (d numbers) stays at the
client, H at the server, and nothing travels beside the model. The paper keeps -alpha h_i (the
gradient of f_i at y_i where local training reaches the minimum) and <h_i, y>; the released code
keeps h_i, as here.

alpha = 0 is FedAvg with the plain mean, by convention and not as a limit: for any alpha > 0,
however small, H moves the model equally far. ``server.lr`` must be 1: it would scale x's step, but
not H. By default the participants' mean x + Delta is evaluated, as in the released code;
``strategy/output=latest`` evaluates the x that is sent next. The released code divides alpha by n_i
/ mean_j n_j, and puts alpha y into the weight decay, so clipping does not see that term.

If a client loses its h_i, H and all h_i start at zero again, with a warning. FedPVR's code and
FedDyn's CIFAR-10 example have alpha .01, FL-Simulator .1.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import (
    ClientSide,
    Cohort,
    LocalContext,
    LocalSummary,
    Payloads,
    Reply,
    Step,
    Tensors,
    zeros_like,
)
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.model_outputs import Participants
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.slots import ServerOptimizer

DRIFT_SUM = "drift_sum"


class FedDynClient(ClientSide):
    """The client half: regularises dynamically with weight alpha, keeps h_i."""

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def begin(self, context: LocalContext) -> None:
        """Start h_i at zero in the client's first round."""
        if self.alpha > 0.0 and DRIFT_SUM not in context.state:
            context.state[DRIFT_SUM] = zeros_like(context.anchor)

    def penalty(self, step: Step) -> Tensor | None:
        """Return (alpha / 2) ||y - x||^2 + alpha <h_i, y - x>, a scalar; None at alpha = 0."""
        if self.alpha == 0.0 or not step.context.anchor:
            return None
        drift_sum = step.context.state[DRIFT_SUM]
        moved = {name: step.params[name] - x for name, x in step.context.anchor.items()}
        terms = [0.5 * m.square().sum() + (drift_sum[n] * m).sum() for n, m in moved.items()]
        return self.alpha * torch.stack(terms).sum()

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Add y_i - x to h_i; nothing is sent."""
        if self.alpha > 0.0:
            self.drift_sum = drift_sum = context.state[DRIFT_SUM]
            context.state[DRIFT_SUM] = {
                name: drift_sum[name] + (context.params[name] - received)
                for name, received in context.anchor.items()
            }
        return {}

    def after_sending(self, reply: Reply, state: dict[str, Tensors]) -> None:
        """Add to h_i the part of y_i - x that was sent, so that H stays the mean of all h_i."""
        if self.alpha > 0.0:
            h = self.drift_sum
            state[DRIFT_SUM] = {n: h[n] + sent.to(h[n]) for n, sent in reply.update.items()}


class FedDynServer(ServerOptimizer):
    """The server half, a server optimizer: x <- x + Delta + H; without H where alpha is 0."""

    coupled_state, kept = frozenset({DRIFT_SUM}), (DRIFT_SUM,)

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self.drift_sum: dict[str, Tensor] = {}

    def init(self, params: Tensors) -> None:
        """Start H at zero."""
        self.drift_sum = zeros_like(params) if self.alpha > 0.0 else {}

    def step(self, params: Tensors, update: Tensors, cohort: Cohort) -> dict[str, Tensor]:
        """Return the params after one step along ``update``."""
        stepped = {name: value + update[name] for name, value in params.items()}
        if self.alpha == 0.0:
            return stepped
        share = cohort.size / cohort.num_clients
        self.drift_sum = {n: mean + share * update[n] for n, mean in self.drift_sum.items()}
        return {name: value + self.drift_sum[name] for name, value in stepped.items()}


class FedDyn(Method):
    """FedDyn (Acar et al. 2021): a linear term moves each client's optimum to the common one; for
    long runs with clients that return.

    H is the mean of h_i over all clients with the plain mean alone.
    """

    replaces = frozenset({"aggregator", "output", "server_optimizer"})
    requires = MappingProxyType(
        {"server.lr": 1.0, "strategy.aggregator": None, "strategy.server_optimizer": None}
    )

    alpha: NotNegative = 0.01
    """weight of the clients' terms (FL-Simulator: .1); 0 is FedAvg with the plain mean"""

    def parts(self) -> Parts:
        """Add the clients' terms, and H to the server's step; evaluate the participants' mean."""
        return Parts(
            client_sides={"feddyn": FedDynClient(self.alpha)},
            aggregator=UniformMean(),
            server_optimizer=FedDynServer(self.alpha),
            output=Participants(),
        )
