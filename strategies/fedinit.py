"""FedInit: understanding how consistency works in federated learning via stage-wise relaxed
initialization.

Sun, Shen, Tao. NeurIPS 2023. https://arxiv.org/abs/2306.05706

A client starts away from where it ended last time, beyond the received model x (Algorithm 1):

    y_0 = x + beta (x - y_last)         y_last: this client's model after its last training
    x <- mean_i y_i

so that local training ends nearer to x. In its first round a client starts at x. beta = 0 is FedAvg
with the plain mean; the paper has .1. y_last (d numbers) stays at the client.

The released code (FL-Simulator) averages y_i - y_0 in place of y_i - x; its flag adds the start to
other methods, as ``strategy=[fedinit,fedsam]`` does here. There, a client whose first round comes
late has the initial model as its y_last. With the mean of the models in place of that server, four
rounds of the code and of this file are equal to rounding. The paper's text was not at hand.
"""

from __future__ import annotations

import torch

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, LocalContext, LocalSummary, Payloads
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

LAST = "fedinit_last"


class FedInitClient(ClientSide):
    """Starts on the far side of x from the client's last model."""

    moves_start = True

    def __init__(self, beta: float) -> None:
        self.beta = beta

    @torch.no_grad()
    def begin(self, context: LocalContext) -> None:
        """Move the model to y_0."""
        if self.beta > 0.0 and LAST in context.state:
            for name, last in context.state[LAST].items():
                x = context.anchor[name]
                context.params[name].copy_(x + self.beta * (x - last))
            context.start_here()

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Keep y_last; nothing is sent."""
        if self.beta > 0.0:
            last = {name: context.params[name].detach().clone() for name in context.anchor}
            context.state[LAST] = last
        return {}


class FedInit(Method):
    """FedInit (Sun et al. 2023): a client starts beyond the global model, away from where it ended
    last time; against drift, for clients that return.
    """

    beta: NotNegative = 0.1
    """how far beyond the received model; 0 is FedAvg with the plain mean"""

    def parts(self) -> Parts:
        """Move the clients' start, and average the models without weights."""
        return Parts(client_sides={"fedinit": FedInitClient(self.beta)}, aggregator=UniformMean())
