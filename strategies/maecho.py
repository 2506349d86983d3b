"""MA-Echo: one-shot federated learning through models' common harmonized optima.

Su, Yang, Li, Xue. "One-shot Federated Learning without server-side training". Neural Networks 2023.
https://arxiv.org/abs/2204.12493

Clients train to convergence and send their models W_i and, for every layer, the projection P_i onto
its inputs (fusion/projections.py). Along directions outside P_i a client's layer can move without
changing its outputs. The server moves a common W and the clients' V_i, from V_i = W_i, towards each
other (Section 5; W (out, d) on inputs of width d, so projections multiply from the right):

    W   <- W - s sum_i alpha_i (W - V_i) P_i
    V_i <- V_i + s Norm((W - V_i) (I - P_i))                             the result is mean_i V_i

This is the authors' released loop and the default: alpha_i = 1 / N; s = 1.6 and 60 iterations for
their MLP; s = .05, 300 iterations and Norm (each row of the increment divided by its length) for
their CNN. The paper prints two other loops, which you can choose with ``loop``:

    loop=algorithm1     W <- W - 2 eta sum_i alpha_i (W - V_i) P_i,
                        V_i <- V_i + (W - V_i) (I - mu / (1 + mu) P_i), mu = 1       (Algorithm 1)
    loop=equation11     the same W step; V_i = W_i + (W - W_i) (I - mu / (1 + mu) P_i)    (eq. 11)

both with result W. Algorithm 1 forgets the W_i: iterated, I - P / 2 contracts W - V_i in every
direction. The paper takes alpha from eq. 6, the weights that make the step shortest:

    min_alpha || sum_i alpha_i (W - V_i) P_i ||^2,   sum_i alpha_i = 1,  0 <= alpha_i <= C

Here every loop has this option (weights=program); it lowered each one's accuracy on the golden case
(docs/results/maecho.md).

The classifier is not iterated: the row of a class is the mean over the clients that hold more than
one example of it, or 0 if no client does. Tensors that belong to no layer are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from logging import INFO
from types import MappingProxyType
from typing import Annotated, Literal

import torch
from flwr.common.logger import log
from pydantic import Field
from torch import Tensor

from fedhet.common.configured import Key
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Device, NotNegative, Positive, Seed, ShareAboveZero, Whole
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.fusion.maecho_iterates import Cumulative, FromLocal, Iterate, Normalised
from fedhet.strategies.fusion.projections import (
    Layer,
    Projections,
    bias_of,
    local_models,
    masked_classifier,
    projected_layers,
    read_layer,
    unflattened,
)
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.regmean import regression_mean

Loop = Literal["released", "algorithm1", "equation11"]
Weights = Literal["uniform", "program"]
Initial = Literal["average", "first", "random", "regmean"]
Absent = Literal["zero", "keep"]
_CHECK_EVERY = 10  # iterations between tests for convergence, which wait for the GPU


class HarmonizedOptima:
    """MA-Echo's aggregator: clients' models and projections in, the fused model out."""

    reads = Reads.MODELS

    def __init__(self, method: MAEcho) -> None:
        self.how, self.iterations = method, method.iterations
        self.device = None if method.device == "auto" else torch.device(method.device)

    @torch.no_grad()
    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to the fused model."""
        # looked for here: processes that are forked after that could not use a GPU
        device = self.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        fused = masked_classifier(params, replies, self.how.absent)
        for name in projected_layers(replies):
            own = {part: params[part] for part in (name, bias_of(name)) if part in params}
            local = local_models(own, replies)  # one layer at a time: N models are large
            layer = read_layer(name, local, replies, device)
            fused |= unflattened(name, self._fuse(layer).cpu(), params)
        rest = {name: x for name, x in params.items() if name not in fused}
        fused |= {name: values.mean(0) for name, values in local_models(rest, replies).items()}
        return {name: fused[name] - x for name, x in params.items()}

    def _fuse(self, layer: Layer) -> Tensor:
        how, iterate = self.how, self._iterate(layer, self._initial(layer))
        stride = how.step if how.loop == "released" else 2.0 * how.eta
        iteration, length = 0, float("inf")
        while iteration < self.iterations and max(length, iterate.remaining) >= how.tolerance:
            moved = iterate.iterate(stride)
            iteration += 1
            if iteration == self.iterations or (how.tolerance and iteration % _CHECK_EVERY == 0):
                length = iterate.relative_length(moved)
        clients, width, rank = layer.bases.shape
        message = "MA-Echo: %s of %s clients, rank %s of %s: %s iterations, the last step %.1e of W"
        log(INFO, message, layer.name, clients, rank, width, iteration, length)
        return iterate.result()

    def _iterate(self, layer: Layer, start: Tensor) -> Iterate:
        """Return the loop's W and V_i of a layer; W starts at ``start`` (out, d)."""
        how, kappa = self.how, self.how.mu / (1.0 + self.how.mu)
        cap = how.cap if how.weights == "program" else None
        if how.loop == "algorithm1":
            return Cumulative(layer, start, cap, 1.0, kappa, mean=False)
        if how.loop == "equation11":
            return FromLocal(layer, start, cap, kappa)
        if how.normalise:
            return Normalised(layer, start, cap, how.step)
        return Cumulative(layer, start, cap, how.step, 1.0, mean=True)

    def _initial(self, layer: Layer) -> Tensor:
        initial = self.how.initial
        if initial == "first":
            return layer.local[0]
        if initial == "random":
            generator = torch.Generator().manual_seed(self.how.seed)
            drawn = torch.randn(layer.local[0].shape, generator=generator)
            return drawn.to(layer.local) * layer.local.std()
        if initial == "regmean":
            return regression_mean(layer)
        return layer.local.mean(0)


class MAEcho(Method):
    """MA-Echo (Su et al. 2023): one round; fuses models that clients trained to convergence, along
    directions that do not change a client's outputs on its data.
    """

    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.aggregator": None})

    loop: Loop = "released"
    """released (the authors' code) | algorithm1 (as printed) | equation11 (Algorithm 1 with the V_i
    of eq. 11)"""
    iterations: Whole = 60
    """tau, the most iterations of a layer"""
    step: Annotated[float, Field(gt=0, le=2)] = 1.6
    """s, the step size of W, and in the released loop of the V_i, which diverge from 2 on"""
    normalise: bool = False
    """divide each row of the local models' increments by its length (the paper's CNN, with step .05
    and 300 iterations)"""
    weights: Weights = "uniform"
    """how clients weigh in a step: uniform | program (eq. 6)"""
    cap: ShareAboveZero = 0.5
    """C of eq. 6, the most that a client may weigh; below 1 / N the weights are uniform"""
    initial: Initial = "average"
    """where the common model starts: average | first | random | regmean"""
    tolerance: NotNegative = 1.0e-6
    """stop iterating a layer when its step is shorter than this share of it; 0: never"""
    absent: Absent = "zero"
    """the classifier's row of a class that nobody holds: zero | keep (the server's)"""
    eta: Positive = 0.5
    """for loop=algorithm1 and equation11: half of W's step size"""
    mu: NotNegative = 1.0
    """for the same loops: how strongly the V_i are held to the local optima"""
    projections: Projections = Projections(form="damped")
    seed: Annotated[Seed, Key("seed")] = 0
    device: Annotated[Device, Key("device")] = "auto"

    def check_together(self) -> None:
        """Refuse a start that needs what the clients do not send."""
        if self.initial == "regmean" and self.projections.form != "ridge":
            raise ConfigError(
                "strategy.maecho.initial=regmean needs the inputs' second moments, which "
                f"strategy.projections.form={self.projections.form} does not hold: set it to ridge"
            )

    def parts(self) -> Parts:
        """Fuse the models of clients that send projections."""
        return Parts(aggregator=HarmonizedOptima(self))
