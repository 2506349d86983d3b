"""The model: any ``nn.Module`` that returns logits."""

from torch import Tensor, nn


class Net(nn.Module):
    """A convolution and two linear layers; ``task.model_options={hidden:128}`` sets the width."""

    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 8, kernel_size=3)
        self.hidden = nn.Linear(8 * 6 * 6, hidden)
        self.classifier = nn.Linear(hidden, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, 10) of images (B, 1, 8, 8)."""
        features = self.convolution(images).relu().flatten(1)
        logits: Tensor = self.classifier(self.hidden(features).relu())
        return logits
