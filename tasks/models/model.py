"""A model: a body, a linear classifier, and the features between them."""

from __future__ import annotations

from torch import OutOfMemoryError, Tensor, nn

from fedhet.common.errors import ConfigError

Shape = tuple[int, int, int]  # (C, H, W) of an image
MAPPED = 128  # features of FedDW's networks


class Model(nn.Module):
    """Body and linear classifier.

    Args:
        body: inputs (B, ...) to features (B, d).
        features: d.
        num_classes: C.
        head_bias: give the head a bias.
        classifier_tensors: number of the body's last tensors that also belong to the classifier.
    """

    classifies = True  # False: the outputs are numbers of a regression

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
        try:
            features = self.body(inputs)
        except RuntimeError as error:
            refuse_integers(inputs, error)
            raise
        return features, self.head(features)


def refuse_integers(inputs: Tensor, error: RuntimeError) -> None:
    """Reject integers that a model could not compute with, unless memory was full."""
    if isinstance(error, OutOfMemoryError) or not isinstance(inputs, Tensor):  # as in torch.fx
        return
    if not inputs.is_floating_point():
        raise ConfigError(
            f"the model fails on inputs of whole numbers, which it gets as {inputs.dtype}, like "
            f"tokens: {error}. Give images and other quantities as float32, such as "
            "images / 255"
        ) from error


def mapped_model(
    extractor: list[nn.Module], extracted: int, num_classes: int, head_bias: bool | None
) -> Model:
    """Return a network of FedDW: an extractor, FedDW's mapping to 128 features, and the head.

    The mapping has no activation at its end. FedDW's text wants a head without bias
    (``task.head_bias=false``); its code, its parameter counts and None here have one.
    """
    mapping = [nn.Linear(extracted, 256), nn.ReLU(), nn.Linear(256, MAPPED)]
    body = nn.Sequential(*extractor, *mapping)
    return Model(body, MAPPED, num_classes, head_bias=head_bias is not False)


def require_size(name: str, input_shape: Shape, least: int) -> None:
    """Reject images that are smaller than ``least`` pixels in height or width."""
    height, width = input_shape[1:]
    if min(height, width) < least:
        raise ConfigError(
            f"task.model={name} needs images of at least {least}x{least} pixels, but these are "
            f"{height}x{width}: choose another task.model (mlp, resnet8) or task.image_size"
        )
