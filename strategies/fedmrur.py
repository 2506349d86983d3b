"""FedMRUR: federated learning with manifold regularization and normalized update reaggregation.

An, Shen, Hu, Luo. NeurIPS 2023. https://arxiv.org/abs/2311.05924

MoFedSAM whose clients keep their representations close to the global model's in the Lorentz model
of hyperbolic space, and whose server gives the mean update the clients' mean norm.

Local objective (eq. 2, 3, 5), z and z_g (B, d) the inputs of the classifier in the local model and
in the model as received:

    F(y)     = CE(y) + gamma R,     R = mean over the batch of exp(D2 / sigma)
    L(z)     = (sqrt(beta + ||z||^2), z)                          on the hyperboloid <L, L> = -beta
    <L, L'>  = - l_0 l'_0 + sum_i l_i l'_i                                                   (eq. 4)
    D2       = -2 beta - 2 <L(z), L(z_g)> = ||z - z_g||^2 - (l_0 - l'_0)^2  >= 0

A step is SAM's (fedsam.py) with F in both passes, the momentum FedCM's (fedcm.py), the aggregate
that of line 15 (components/aggregators.py):

    e = rho grad F(y) / ||grad F(y)||;   v = alpha grad F(y + e) + (1 - alpha) m;   y <- y - eta_l v
    Delta = (mean_p ||D_p||) sum_p D_p / ||sum_p D_p||,   D_p = y_p - x;    x <- x + eta_g Delta
    m     = - Delta / (mean lr_sum of the round that made Delta)

gamma = 0 is MoFedSAM with line 15, the paper's FedMRUR-N; a plain mean is FedMRUR-H; both together
are MoFedSAM, and with rho = 0 and alpha = 1 FedAvg (with a plain mean). R >= 1, so gamma R adds at
least gamma to the reported loss. ``space=euclidean`` has D2 = ||z - z_g||^2 (Table 8).
``lifts=data`` is our reading of Table 9's undefined "original data": the example is lifted with its
representation, L(x, z), so beta + ||x||^2 takes the place of beta.

Algorithm 1 leaves open which mean the clients' momentum is made of and which perturbation is meant.
Here m is made of the stretched Delta; ``strategy.client_momentum.source=mean`` makes it of the
clients' plain mean, and ``strategy.sam.adaptive=true`` with rho .5 takes the relative perturbation.
``+experiment=fedmrur/readings`` compares them in minutes.

Where the paper's Algorithm 1 differs: line 13's Delta points along the displacement, but line 10
uses it as a gradient. With the sign turned, m is as long as K eta_l gradients, and the feedback
(1 - alpha) K eta_l = 1.35 a round diverges. Divided by K eta_l everywhere (Lemma 7), the server's
step would vary with eta_l. So Delta and m are kept apart, as in FL-Simulator's FedCM and MoFedSAM,
on which the paper builds. The paper prints neither the lift (here its reference's, Law et al., ICML
2019) nor how R is reduced (here exp by example, then the mean). From D2 / sigma = 20 on, exp
continues as its tangent, so that large features give a finite gradient.

The paper: alpha .1, rho .5, gamma .005, sigma 1e4, beta 1, eta_l .1 x .998 a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedhet.common.kinds import NotNegative, Positive
from fedhet.strategies.base import ClientSide, Step
from fedhet.strategies.components.aggregators import NormMean
from fedhet.strategies.fedcm import ClientMomentum
from fedhet.strategies.fedsam import SharpnessAware
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts

Space = Literal["lorentz", "euclidean"]
Lifts = Literal["representation", "data"]
_LINEAR_FROM = 20.0  # e^20 = 4.9e8: far from float32's limits, and from any D2 / sigma of use


def lorentz_distance(left: Tensor, right: Tensor, beta: Tensor | float = 1.0) -> Tensor:
    """Return the squared Lorentzian distances D2 (B,) of the lifts of two batches (B, d).

    -2 beta - 2 <L, L'> is a difference of large numbers. This computes a difference of small ones,
    the second as l_0 - l'_0 = <z - z', z + z'> / (l_0 + l'_0), so the rounding error is relative to
    ||z - z'||^2, not to ||z||^2. ``beta`` is one number, or one for each example (B,).
    """
    difference = left - right
    times = (beta + left.square().sum(1)).sqrt() + (beta + right.square().sum(1)).sqrt()
    gap = (difference * (left + right)).sum(1) / times
    return (difference.square().sum(1) - gap.square()).clamp_min(0.0)


def growth(distance: Tensor, sigma: float) -> Tensor:
    """Return exp(distance / sigma), from 20 on its tangent."""
    exponent = distance / sigma
    excess = torch.relu(exponent - _LINEAR_FROM)
    return torch.exp(exponent.clamp_max(_LINEAR_FROM)) * (1.0 + excess)


@dataclass(eq=False)
class ManifoldRegularizer(ClientSide):
    """Adds gamma R to the local objective."""

    measures = frozenset({"lorentz-distance"})

    gamma: float
    sigma: float
    beta: float
    space: Space
    lifts: Lifts

    def penalty(self, step: Step) -> Tensor | None:
        """Return gamma R, a scalar; None at gamma = 0."""
        if self.gamma == 0.0:
            return None
        received = step.context.received_features(step.inputs)
        distance = self._distance(step.features.float(), received.float(), step.inputs)
        step.context.measure("lorentz-distance", distance.mean())
        return self.gamma * growth(distance, self.sigma).mean()

    def _distance(self, features: Tensor, received: Tensor, inputs: Tensor) -> Tensor:
        if self.space == "euclidean":
            return (features - received).square().sum(1)
        beta: Tensor | float = self.beta
        if self.lifts == "data":
            beta = beta + inputs.flatten(1).float().square().sum(1)
        return lorentz_distance(features, received, beta)


class FedMRUR(Method):
    """FedMRUR (An et al. 2023): MoFedSAM; clients stay close to the global model's
    representations in hyperbolic space, and the server stretches the mean update to the updates'
    mean norm; against strong skew.
    """

    replaces = frozenset({"aggregator", "optimizer"})

    gamma: NotNegative = 0.005
    """weight of the regulariser; 0 leaves FedMRUR-N"""
    sigma: Positive = 10000.0
    """scale of the squared distance"""
    beta: Positive = 1.0
    """beta of the hyperboloid <L, L> = -beta"""
    space: Space = "lorentz"
    """where distances are taken: lorentz | euclidean"""
    lifts: Lifts = "representation"
    """what is mapped: representation | data (an example with its representation)"""
    client_momentum: ClientMomentum = ClientMomentum()
    sam: SharpnessAware = SharpnessAware()

    def parts(self) -> Parts:
        """Add the regulariser, and give the mean update the updates' mean norm."""
        regularizer = ManifoldRegularizer(self.gamma, self.sigma, self.beta, self.space, self.lifts)
        return Parts(client_sides={"fedmrur": regularizer}, aggregator=NormMean())
