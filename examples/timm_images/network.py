"""Networks of timm, without their weights; pretrained=True would download them."""

import timm


def vit(num_classes, depth=4):
    """Return a ViT-tiny for 32x32 pixels: half as wide as timm's, and of fewer layers."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 96, "depth": depth}
    return timm.create_model(
        "vit_tiny_patch16_224", pretrained=False, num_classes=num_classes, **sizes
    )


def mobilenet(num_classes):
    """Return timm's smallest MobileNetV3."""
    return timm.create_model("mobilenetv3_small_050", pretrained=False, num_classes=num_classes)
