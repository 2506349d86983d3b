"""A network of timm's, without its weights; pretrained=True would download them."""

import timm


def mobilenet(num_classes):
    """Return the smallest MobileNetV3."""
    return timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=num_classes)
