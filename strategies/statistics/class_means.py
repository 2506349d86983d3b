"""Class means over all clients' examples: what FedDW, FedDistill+ and FedProto share.

A client sends, by class, the sum of a vector over its examples and their number; the server takes
the mean of each class over everybody's examples (FedDW eq. 7, FedProto eq. 6):

    M[c] = sum_i S_i[c] / sum_i n_i[c]         over the replies of the round

The method chooses the row of a class that nobody holds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedhet.strategies.base import LocalContext

SUMS, COUNTS, MEANS = "sums", "counts", "means"
_BATCH = 500  # examples at once; nothing depends on it but speed


@torch.no_grad()
def class_sums(
    context: LocalContext, vectors: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Return "sums" (C, d) and "counts" (C,) over the client's examples, by class.

    ``vectors`` gives (B, d) of a batch's features and logits. The model is put in eval mode, and
    the examples are not augmented.
    """
    context.model.eval()
    sums, counts = [], []
    for inputs, labels in context.data.batches(_BATCH, generator=None, train=False):
        rows = vectors(*context.model(inputs)).float()
        members = torch.nn.functional.one_hot(labels, context.num_classes).to(rows.dtype)
        sums.append(members.T @ rows)
        counts.append(members.sum(0))
    return {SUMS: torch.stack(sums).sum(0), COUNTS: torch.stack(counts).sum(0)}


def class_means(sums: Tensor, counts: Tensor, otherwise: Tensor, least: float = 0.0) -> Tensor:
    """Return sums / counts by row (C, d), and a row of ``otherwise`` where counts <= ``least``."""
    held = (counts > least)[:, None]
    return torch.where(held, sums / counts.clamp_min(1e-12)[:, None], otherwise)
