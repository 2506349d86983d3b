"""FedDW's mapping, which all of its networks have between extractor and classifier.

256 and 128 wide, without activation at its end: the 128 values are the features. FedDW's text wants
a head without bias (``task.head_bias=false``); its code, and the counts of parameters, have one.
"""

from __future__ import annotations

from torch import nn

from tasks.models.model import Model

FEATURES = 128


def mapping_layers(extracted: int) -> list[nn.Module]:
    """Return the mapping of extracted features (B, extracted) to (B, 128)."""
    return [nn.Linear(extracted, 256), nn.ReLU(), nn.Linear(256, FEATURES)]


def mapped_model(
    extractor: list[nn.Module], extracted: int, num_classes: int, head_bias: bool | None
) -> Model:
    """Return a model of extractor, mapping and head.

    Args:
        extractor: layers from images to (B, extracted).
        extracted: how many features it gives.
        num_classes: C.
        head_bias: None: the head has one.
    """
    body = nn.Sequential(*extractor, *mapping_layers(extracted))
    return Model(body, FEATURES, num_classes, head_bias=head_bias is not False)
