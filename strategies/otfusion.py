"""OT fusion: the mean of the clients' models, aligned by optimal transport.

Singh, Jaggi. "Model fusion via optimal transport". NeurIPS 2020. https://arxiv.org/abs/1910.05653

Each client's network is put into the neuron order of the first client's (the lowest id among the
replies), layer by layer from the inputs: with n neurons in a layer and T_{l-1} the transport of the
layer before,

    W~ = W T_{l-1},   W <- T_l^T W~,
    T_l = n argmin_T sum_jk T_jk C_jk,   T >= 0,   T 1 = T^T 1 = 1 / n

where C_jk is the Euclidean distance, not squared, between row j of W~ and row k of the first
client's layer, both with their bias as a further column and scaled to length 1. These are the
choices of MA-Echo's released code: exact transport (ot.emd), uniform marginals, networks matched by
weights. With as many neurons on both sides T is a permutation, so a client's network computes the
same as before. Biases and channel-wise normalisation move with their rows; the classes keep their
places. fusion/layer_chain.py decides which networks can be aligned.

Projections move along, P <- T_{l-1}^T P T_{l-1}, that is F <- T_{l-1}^T F: ``strategy=[maecho,
alignment]`` is MA-Echo + OT (its Section 5.3; the released code passes the clients' data through
the aligned networks again, which gives the same projections for one more exchange). strategies/
average.py averages the aligned models, as in MA-Echo's baseline OT.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.common.errors import ConfigError
from fedhet.strategies.average import MaskedMean
from fedhet.strategies.base import Reads, Reply, Tensors, local_model, subtract
from fedhet.strategies.fusion.layer_chain import Chain, ChainServer, Link, read_chain, reordered
from fedhet.strategies.fusion.projections import PROJECTIONS, SCALES, flattened
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_counts import class_count_parts

_ITERATIONS = 10_000_000  # POT's default of 100,000 is too low above a few hundred neurons


def transport(rows: Tensor, anchor: Tensor) -> Tensor:
    """Return the optimal order of rows (n, d): ``rows[order]`` matches ``anchor`` (n, d)."""
    import ot

    left, right = (F.normalize(matrix.double(), eps=1e-9) for matrix in (rows, anchor))
    distances = torch.cdist(left, right).numpy()
    plan = torch.from_numpy(ot.emd([], [], distances, numItermax=_ITERATIONS))
    order = plan.argmax(0)
    if not torch.equal(order.sort().values, torch.arange(len(order))):
        raise RuntimeError(f"ot.emd found no solution for a layer of {len(order)} neurons")
    return order


class NeuronAlignment:
    """The transform: every reply in the neuron order of the first one, projections included."""

    reads = Reads.MODELS
    reorders: Literal[True] = True

    def __init__(self) -> None:
        if importlib.util.find_spec("ot") is None:
            raise ConfigError(
                "alignment needs POT, which is not installed: pip install '.[fusion]', or choose "
                "another strategy"
            )

    @torch.no_grad()
    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> list[Reply]:
        """Return the aligned replies.

        Raises:
            ConfigError: for a model that is not a chain, or with other payloads by parameter.
        """
        chain, anchor = read_chain(params), local_model(params, replies[0])
        for name, tensors in replies[0].payloads.items():
            if name not in (PROJECTIONS, SCALES) and not params.keys().isdisjoint(tensors):
                raise ConfigError(
                    f"clients send {name} for each parameter, which alignment cannot reorder: drop "
                    "alignment or the method that needs it from strategy=[...]"
                )
        return [replies[0], *(self._aligned(chain, params, r, anchor) for r in replies[1:])]

    def _aligned(
        self, chain: Sequence[Link], params: Tensors, reply: Reply, anchor: Tensors
    ) -> Reply:
        model = local_model(params, reply)
        orders: list[Tensor] = []
        for link in chain[:-1]:
            columns = link.columns(orders[-1] if orders else None)
            rows = flattened(link.weight, model)[:, columns]
            orders.append(transport(rows, flattened(link.weight, anchor)))
        payloads = dict(reply.payloads)
        if PROJECTIONS in payloads:
            payloads[PROJECTIONS] = {
                link.weight: payloads[PROJECTIONS][link.weight][link.columns(before)]
                for link, before in zip(chain, [None, *orders], strict=True)
            }
        update = subtract(reordered(chain, model, orders), params)
        return replace(reply, update=update, payloads=payloads)


class OTFusion(Method):
    """OT fusion (Singh and Jaggi 2020): one round; averages models whose neurons were put into one
    order by optimal transport.
    """

    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.aggregator": None})

    def parts(self) -> Parts:
        """Align the models and average them."""
        return class_count_parts() | alignment_parts() | Parts(aggregator=MaskedMean())


class Alignment(Method):
    """OT alignment (Singh and Jaggi 2020): puts the clients' neurons into one order by optimal
    transport before they are averaged; for combinations such as strategy=[maecho,alignment].
    """

    def parts(self) -> Parts:
        """Align the models."""
        return alignment_parts()


def alignment_parts() -> Parts:
    """Return the parts that put neurons into the first client's order."""
    return Parts(
        client_sides={"chain": Chain()},
        server_sides={"chain": ChainServer()},
        transforms={"alignment": NeuronAlignment()},
    )
