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
their CNN. The paper prints two other loops, which are aggregators of their own:

    maecho_algorithm1   W <- W - 2 eta sum_i alpha_i (W - V_i) P_i,
                        V_i <- V_i + (W - V_i) (I - mu / (1 + mu) P_i), mu = 1       (Algorithm 1)
    maecho_eq11         the same W step; V_i = W_i + (W - W_i) (I - mu / (1 + mu) P_i)    (eq. 11)

both with result W. Algorithm 1 forgets the W_i: iterated, I - P / 2 contracts W - V_i in every
direction. The paper takes alpha from eq. 6, the weights that make the step shortest:

    min_alpha || sum_i alpha_i (W - V_i) P_i ||^2,   sum_i alpha_i = 1,  0 <= alpha_i <= C

Here that is an option of every loop (weights=program); it lowered the accuracy of each one on the
golden case (docs/results/maecho.md).

The classifier is not iterated: the row of a class is the mean over the clients that hold more than
one example of it, and 0 where no client does. Tensors that belong to no layer are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from logging import INFO
from typing import Literal, Unpack

import torch
from flwr.common.logger import log
from torch import Tensor

from fedhet.common.errors import ConfigError, require_choice, require_range, require_whole
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fusion.maecho_iterates import Cumulative, FromLocal, Iterate, Normalised
from fedhet.strategies.fusion.projected_layers import (
    Layer,
    ProjectionServer,
    local_models,
    masked_classifier,
    projected_layers,
    read_layer,
    unflattened,
)
from fedhet.strategies.fusion.projections import ProjectionClient, bias_of
from fedhet.strategies.regmean import regression_mean
from fedhet.strategies.round.arguments import Slots

_CHECK_EVERY = 10  # iterations between tests for convergence, which wait for the GPU


class Released:
    """The authors' released loop.

    Args:
        step: s, of W and of the V_i, in (0, 2]: from 2 on the V_i diverge.
        normalise: Norm: divide each row of the V_i's increments by its length.
    """

    def __init__(self, step: float = 1.6, normalise: bool = False) -> None:
        self.step = require_range("strategy.maecho.step", step, high=2.0, open_low=True)
        self.stride = self.step
        self.normalise = normalise

    def start(self, layer: Layer, model: Tensor, cap: float | None) -> Iterate:
        """Return the iterate of a layer that starts at ``model`` (out, d); ``cap`` is C."""
        if self.normalise:
            return Normalised(layer, model, cap, self.step)
        return Cumulative(layer, model, cap, self.step, 1.0, mean=True)


class Algorithm1:
    """Algorithm 1 as printed: eta is half of W's step, mu holds the V_i to their last values."""

    def __init__(self, eta: float = 0.5, mu: float = 1.0) -> None:
        self.stride = 2.0 * require_range("strategy.maecho.eta", eta, open_low=True)
        self.kappa = require_range("strategy.maecho.mu", mu) / (1.0 + mu)

    def start(self, layer: Layer, model: Tensor, cap: float | None) -> Iterate:
        """Return the loop's iterate."""
        return Cumulative(layer, model, cap, 1.0, self.kappa, mean=False)


class Equation11(Algorithm1):
    """Algorithm 1 with the V_i of eq. 11, which mu holds to the W_i."""

    def start(self, layer: Layer, model: Tensor, cap: float | None) -> Iterate:
        """Return the loop's iterate."""
        return FromLocal(layer, model, cap, self.kappa)


class HarmonizedOptima:
    """MA-Echo's aggregator: clients' models and projections in, the fused model out.

    Args:
        loop: :class:`Released`, :class:`Algorithm1` or :class:`Equation11`.
        iterations: tau, at most.
        weights: alpha: "uniform", or "program" (eq. 6).
        cap: C of eq. 6; below 1 / N the weights are uniform.
        initial: W at first: the clients' "average", the "first" client's model, "random" numbers
            with the clients' standard deviation, or their "regmean" (strategies/regmean.py).
        tolerance: a layer stops when its step is shorter than this share of it; 0: never.
        absent: the classifier's row of a class that no client holds: "zero", or "keep" x's.
        form: of the clients' projections, "ridge" or "damped"; initial="regmean" needs "ridge".
        seed: of random numbers.
        device: where to compute: "cpu", "cuda", or "auto".
    """

    reads = Reads.MODELS

    def __init__(
        self,
        loop: Released | Algorithm1 | None = None,
        iterations: int = 60,
        weights: Literal["uniform", "program"] = "uniform",
        cap: float = 0.5,
        initial: Literal["average", "first", "random", "regmean"] = "average",
        tolerance: float = 1e-6,
        absent: Literal["zero", "keep"] = "zero",
        form: str = "ridge",
        seed: int = 0,
        device: str = "auto",
    ) -> None:
        key = "strategy.maecho"
        self.loop = loop or Released()
        self.iterations = require_whole(f"{key}.iterations", iterations, low=0)
        self.weights = require_choice(f"{key}.weights", weights, ("uniform", "program"))
        starts = ("average", "first", "random", "regmean")
        self.initial = require_choice(f"{key}.initial", initial, starts)
        self.absent = require_choice(f"{key}.absent", absent, ("zero", "keep"))
        self.cap = require_range(f"{key}.cap", cap, high=1.0, open_low=True)
        self.tolerance = require_range(f"{key}.tolerance", tolerance)
        self.seed = seed
        self.device = None if device == "auto" else torch.device(device)
        if initial == "regmean" and form != "ridge":
            raise ConfigError(
                f"{key}.initial=regmean needs the inputs' second moments, which "
                f"strategy.projections.form={form} does not hold: set it to ridge"
            )

    @torch.no_grad()
    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to the fused model."""
        # looked for here: processes that are forked after that could not use a GPU
        device = self.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        fused = masked_classifier(params, replies, self.absent)
        for name in projected_layers(replies):
            own = {part: params[part] for part in (name, bias_of(name)) if part in params}
            local = local_models(own, replies)  # one layer at a time: N models are large
            layer = read_layer(name, local, replies, device)
            fused |= unflattened(name, self._fuse(layer).cpu(), params)
        rest = {name: x for name, x in params.items() if name not in fused}
        fused |= {name: values.mean(0) for name, values in local_models(rest, replies).items()}
        return {name: fused[name] - x for name, x in params.items()}

    def _fuse(self, layer: Layer) -> Tensor:
        cap = self.cap if self.weights == "program" else None
        iterate = self.loop.start(layer, self._initial(layer), cap)
        iteration, length = 0, float("inf")
        while iteration < self.iterations and max(length, iterate.remaining) >= self.tolerance:
            moved = iterate.iterate(self.loop.stride)
            iteration += 1
            if iteration == self.iterations or (self.tolerance and iteration % _CHECK_EVERY == 0):
                length = iterate.relative_length(moved)
        clients, width, rank = layer.bases.shape
        message = "MA-Echo: %s of %s clients, rank %s of %s: %s iterations, the last step %.1e of W"
        log(INFO, message, layer.name, clients, rank, width, iteration, length)
        return iterate.result()

    def _initial(self, layer: Layer) -> Tensor:
        if self.initial == "first":
            return layer.local[0]
        if self.initial == "random":
            generator = torch.Generator().manual_seed(self.seed)
            drawn = torch.randn(layer.local[0].shape, generator=generator)
            return drawn.to(layer.local) * layer.local.std()
        if self.initial == "regmean":
            return regression_mean(layer)
        return layer.local.mean(0)


class MAEcho(FederatedStrategy):
    """One round, whose replies are fused: ``MAEcho(local_lr=.01).start(..., num_rounds=1)``."""

    def __init__(self, rank: int | None = None, **slots: Unpack[Slots]) -> None:
        slots.setdefault("aggregator", HarmonizedOptima())
        super().__init__(
            client_sides={"projections": ProjectionClient(form="damped", rank=rank)},
            server_sides={"projections": ProjectionServer("damped")},
            **slots,
        )
