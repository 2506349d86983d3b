"""OT fusion: the mean of the clients' models, aligned by optimal transport.

Singh, Jaggi. "Model fusion via optimal transport". NeurIPS 2020. https://arxiv.org/abs/1910.05653

fusion/neuron_alignment.py puts all clients' neurons into the first client's order; strategies/
average.py averages the aligned models, as in MA-Echo's baseline OT.
"""

from __future__ import annotations

from types import MappingProxyType

from fedhet.strategies.average import MaskedMean
from fedhet.strategies.fusion.layer_chain import Chain, ChainServer
from fedhet.strategies.fusion.neuron_alignment import NeuronAlignment
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_counts import class_count_parts


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
