"""KeepFeatures: clients stay near the received model's view of their examples.

    L(y) = CE(y) + weight * mean over the batch of ||z - z_x||^2

z are the features of an example in the local model y, z_x in the received model x: the inputs of
the classifier. weight = 0 is FedAvg.
"""

from torch import Tensor

from fedhet import Method, Parts
from fedhet.common.kinds import NotNegative
from fedhet.strategies.base import ClientSide, Step


class KeepFeaturesClient(ClientSide):
    """Adds the distance of the features to the local objective."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def penalty(self, step: Step) -> Tensor | None:
        """Return weight * mean ||z - z_x||^2, a scalar; None at weight 0."""
        if self.weight == 0.0:
            return None
        received = step.context.received_features(step.inputs)
        return self.weight * (step.features - received).square().sum(dim=1).mean()


class KeepFeatures(Method):
    """KeepFeatures (this project): keeps clients near the received model's features."""

    weight: NotNegative = 0.01
    """weight of the distance; 0 is FedAvg"""

    def parts(self) -> Parts:
        """Add the distance at the clients."""
        return Parts(client_sides={"keepfeatures": KeepFeaturesClient(self.weight)})
