"""The plain mean of the clients' models, with MA-Echo's classifier: "Average" in its tables.

Su, Yang, Li, Xue. Neural Networks 2023. https://arxiv.org/abs/2204.12493

All clients have the same weight. The classifier's row of a class is the mean over the clients that
hold more than one example of the class, as in the released code's Average and OT.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from torch import Tensor

from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.fusion.projections import local_models, masked_classifier
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_counts import class_count_parts


class MaskedMean:
    """(1 / |S|) sum_i y_i; for the classifier, the mean over the clients that hold the class."""

    reads = Reads.MODELS

    def __call__(self, params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
        """Return the change from x to that model; replies have class counts."""
        fused = {name: values.mean(0) for name, values in local_models(params, replies).items()}
        fused |= masked_classifier(params, replies)
        return {name: fused[name] - x for name, x in params.items()}


class Average(Method):
    """Average (Su et al. 2023): one round; the plain mean of the clients' models, each class of the
    classifier from the clients that hold it. The one-shot baseline.
    """

    replaces = frozenset({"aggregator"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.aggregator": None})

    def parts(self) -> Parts:
        """Average the models of clients that send their class counts."""
        return class_count_parts() | Parts(aggregator=MaskedMean())
