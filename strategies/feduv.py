"""FedUV: uniformity and variance for heterogeneous federated learning.

Son, Kim, Chung, Huang, Liu. CVPR 2024. https://arxiv.org/abs/2402.18372

Two terms make local training behave as though the client's data were IID:

    L(y) = CE(y) + lambda_V V + lambda_U U
    V = mean over classes of max(0, gamma - std over the batch of the softmax outputs)
    U = mean over pairs i < j of exp(-||z_i - z_j||^2 / sigma)

gamma = 1 / sqrt(C) is the (unbiased) standard deviation of a column of the identity (C, C), that is
of a batch that holds each class once, classified with certainty. U spreads the features z; sigma is
the median of the batch's nonzero squared distances. It has a gradient, too, so U does not change
with the scale of z. For an even number it is the lower of the middle two, as in torch.median.

Coefficients as in the released code, 2.5 and .5. Both 0 is FedAvg.

A batch of one example has neither pairs nor a standard deviation, and gets no penalty. Where all
features of a batch are equal, U is 1, without gradient. (The released code gets NaN in both cases.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import relu, softmax

from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, Step
from fedhet.strategies.method import Method
from fedhet.strategies.parts import Parts


class FedUVClient(ClientSide):
    """Adds lambda_V V (``variance``) and lambda_U U (``uniformity``) to the local objective."""

    by_class = True

    def __init__(self, variance: float, uniformity: float) -> None:
        self.variance = variance
        self.uniformity = uniformity

    def penalty(self, step: Step) -> Tensor | None:
        """Return lambda_V V + lambda_U U, a scalar; None if both are 0, and for one example."""
        if len(step.labels) < 2:
            return None
        terms = []
        if self.variance > 0:
            terms.append(self.variance * missing_variance(step.logits))
        if self.uniformity > 0:
            terms.append(self.uniformity * crowding(step.features))
        return torch.stack(terms).sum() if terms else None


def missing_variance(logits: Tensor) -> Tensor:
    """Return V, a scalar, of a batch's logits (B, C), B > 1."""
    gamma = logits.shape[1] ** -0.5
    return relu(gamma - softmax(_precise(logits), dim=1).std(dim=0)).mean()


def crowding(features: Tensor) -> Tensor:
    """Return U, a scalar in [0, 1], of a batch's features (B, d), B > 1."""
    distances = squared_distances(features)
    return torch.exp(-distances / median_apart(distances)).mean()


def median_apart(distances: Tensor) -> Tensor:
    """Return sigma, the median of the distances (n,) that are not zero; 1 where all are.

    The gradient is nanmedian's, shared equally by all entries that equal the median. Both are
    written out here: on a GPU every step would wait for nanmedian without a dim, and with a dim its
    gradient goes to only one of these entries, not always the same.
    """
    with torch.no_grad():
        ordered = torch.where(distances > 0, distances, torch.nan).sort().values  # NaN is last
        middle = ((distances > 0).sum() - 1).clamp_min(0) // 2
        median = ordered.gather(0, middle[None])[0]  # NaN where all are equal
        chosen = distances == median
    through = torch.where(chosen, distances, 0.0).sum() / chosen.sum().clamp_min(1)
    return torch.nan_to_num(median, nan=1.0) + (through - through.detach())


def squared_distances(features: Tensor) -> Tensor:
    """Return ||z_i - z_j||^2 of features (B, d), for pairs i < j (B (B - 1) / 2,); 0 where equal.

    The values are pdist's, of the differences. The gradient is the Gram matrix's: finite at 0, and
    without the B x B x d tensor that pdist makes for it on a GPU.
    """
    features = _precise(features)
    constant = features.detach()
    with torch.autocast(features.device.type, enabled=False):
        values = torch.pdist(constant).square()
        centred = features - constant.mean(dim=0)  # no distance changes, and less is cancelled
        gram = centred @ centred.T
    norms, size = gram.diagonal(), len(gram)
    first, second = torch.triu_indices(size, size, offset=1, device=gram.device)
    through = (norms[:, None] + norms - 2 * gram)[first, second]
    return through + (values - through).detach()


def _precise(values: Tensor) -> Tensor:
    """Return them in float32 if they have fewer bits (autocast)."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


class FedUV(Method):
    """FedUV (Son et al. 2024): keeps a batch's outputs varied and its features spread, as IID data
    would; against label skew, without more bytes.
    """

    variance: NotNegative = 2.5
    """coefficient of V, the missing variance of a batch's outputs; 0: without it"""
    uniformity: NotNegative = 0.5
    """coefficient of U, how crowded a batch's features are; 0: without it; both 0 is FedAvg"""

    def parts(self) -> Parts:
        """Add the two terms at the clients."""
        return Parts(client_sides={"feduv": FedUVClient(self.variance, self.uniformity)})
