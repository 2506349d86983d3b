"""Class counts: how many examples of each class a client holds, to weigh models by class.

Beside the model a client sends C numbers. ProjectionClient (fusion/projections.py) sends the same
payload beside its projections.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    ClientSide,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    RefusedReplyError,
    Reply,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.components.tensor_selection import require_output_by_class
from fedhet.strategies.parts import Parts

CLASS_COUNTS, COUNTS = "class_counts", "counts"
HEAD = "head"


class ClassCountsClient(ClientSide):
    """Sends the class counts."""

    by_class = True
    sends, counts = frozenset({CLASS_COUNTS}), frozenset({COUNTS})

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse a classifier without an output for each class."""
        require_output_by_class(model)

    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Return the counts (C,)."""
        return counted(context)


class ClassCountsServer(ServerSide):
    """Refuses class counts that cannot be right."""

    needs = frozenset({CLASS_COUNTS})

    def init(self, params: Tensors) -> None:
        """Note the number of classes; refuse a classifier that stays at the clients."""
        if f"{HEAD}.weight" not in params:
            raise ConfigError(
                f"models are fused with their classifiers, but {HEAD}.weight stays at the clients: "
                "set strategy.personal so that it is shared (none)"
            )
        self.classes = len(params[f"{HEAD}.weight"])

    def expected(self) -> Shapes:
        """Return the counts' shape (C,)."""
        return {CLASS_COUNTS: {COUNTS: (self.classes,)}}

    def check(self, reply: Reply) -> None:
        """Refuse counts that do not sum to n_i."""
        check_class_counts(reply, self.classes)


def class_count_parts() -> Parts:
    """Return the parts of a method that weighs clients' models by the classes that they hold."""
    return Parts(
        client_sides={CLASS_COUNTS: ClassCountsClient()},
        server_sides={CLASS_COUNTS: ClassCountsServer()},
    )


def counted(context: LocalContext) -> Payloads:
    """Return the payload: how many examples of each class (C,) the client holds."""
    return {CLASS_COUNTS: {COUNTS: torch.tensor(context.data.class_counts()).float()}}


def check_class_counts(reply: Reply, classes: int | None) -> None:
    """Refuse counts of another number of classes, or that do not sum to n_i.

    ``classes`` is C; None: a model without a classifier has any number.
    """
    counts = reply.payloads[CLASS_COUNTS].get(COUNTS)
    if counts is None or counts.dim() != 1:
        raise RefusedReplyError("its class counts are not a vector")
    if classes is not None and len(counts) != classes:
        raise RefusedReplyError(f"it counts {len(counts)} classes, not {classes}")
    if float(counts.sum()) != reply.num_examples:
        raise RefusedReplyError(
            f"its class counts sum to {float(counts.sum()):g}, and it has "
            f"{reply.num_examples} examples"
        )


def class_counts(replies: Sequence[Reply]) -> Tensor:
    """Return how many examples of each class each client holds (N, C)."""
    return torch.stack([reply.payloads[CLASS_COUNTS][COUNTS] for reply in replies])


def holder_shares(replies: Sequence[Reply]) -> Tensor:
    """Return each client's share of every class (N, C): 1 over how many hold it, or 0.

    A client holds a class with more than one example of it, as in MA-Echo's released code. Where
    nobody holds a class, all its shares are 0.
    """
    holds = (class_counts(replies) > 1).float()
    return holds / holds.sum(0).clamp_min(1.0)
