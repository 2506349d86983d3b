"""A trained model for inference: raw examples in, probabilities or a regression's values out."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import softmax

from fedhet.tasks.transform import InputTransform


class InferenceModel(nn.Module):
    """A model that returns features and outputs, with the normalisation of its inputs.

    Args:
        model: a run's model.
        transform: the transform of its inputs.
        probabilities: whether the outputs are logits of classes; if not, they stay as they are.
    """

    def __init__(self, model: nn.Module, transform: InputTransform, *, probabilities: bool) -> None:
        super().__init__()
        self.prepare = transform.module()
        self.model = model
        self.probabilities = probabilities

    def forward(self, raw: Tensor) -> Tensor:
        """Return the outputs of pixels 0..255 (B, channels, H, W), tokens (B, T) or numbers.

        Probabilities are (B, C), or (B, C, H, W) for a segmentation.
        """
        outputs: Tensor = self.model(self.prepare(raw))[1]
        return softmax(outputs, dim=1) if self.probabilities else outputs
