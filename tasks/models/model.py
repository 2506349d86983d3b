"""A model is a body and a head, and returns the features between them."""

from __future__ import annotations

from torch import Tensor, nn


class Model(nn.Module):
    """Body and linear classifier.

    Args:
        body: inputs (B, ...) to features (B, d).
        features: d.
        num_classes: C.
        head_bias: give the head a bias.
        classifier_tensors: how many of the body's last tensors count as classifier, beside the
            head's.
    """

    def __init__(
        self,
        body: nn.Module,
        features: int,
        num_classes: int,
        *,
        head_bias: bool,
        classifier_tensors: int = 0,
    ) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(features, num_classes, bias=head_bias)
        self.classifier_tensors = classifier_tensors + (2 if head_bias else 1)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, d) and logits (B, C)."""
        features = self.body(inputs)
        return features, self.head(features)
