"""A trained model for inference: raw examples in, probabilities out."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import softmax

from fedhet.tasks.transform import InputTransform


class InferenceModel(nn.Module):
    """A classifier, which returns features and logits, with its normalisation and softmax."""

    def __init__(self, model: nn.Module, transform: InputTransform) -> None:
        super().__init__()
        self.prepare = transform.module()
        self.model = model

    def forward(self, raw: Tensor) -> Tensor:
        """Return probabilities (B, C) of pixels 0..255 (B, channels, H, W) or tokens (B, T)."""
        return softmax(self.model(self.prepare(raw))[1], dim=1)
