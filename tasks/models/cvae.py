"""The conditional variational auto-encoder of MA-Echo's Figure 4.

Sohn, Lee, Yan, "Learning structured output representation using deep conditional generative
models", NeurIPS 2015. MA-Echo gives only the decoder, 30-256-512-784. Our reading: 20 latent
numbers and a one-hot class of 10; the encoder is the mirror image; ReLU, Bernoulli pixels, and the
prior N(0, I) for every class.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedhet.tasks.models.model import Shape

LATENT = 20
HIDDEN = (256, 512)  # the decoder's; the encoder has them in reverse


class CVAE(nn.Module):
    """Encoder and decoder of d pixels in [0, 1], conditioned on the class; without accuracy."""

    classifies = False
    fused = "decoder"  # the part that fusion merges; the encoder stays with its client

    def __init__(self, pixels: int, num_classes: int, latent: int = LATENT) -> None:
        super().__init__()
        self.pixels, self.num_classes, self.latent = pixels, num_classes, latent
        self.encoder = _layers(pixels + num_classes, *reversed(HIDDEN), 2 * latent)
        self.decoder = _layers(latent + num_classes, *HIDDEN, pixels)
        self.classifier_tensors = 2  # the decoder's last layer, for methods that count from there

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the posterior's means (B, latent), and each example's two parts of -ELBO (B, 2).

        The parts, in nats: the cross-entropy of the pixels given one sample of the posterior, and
        the posterior's divergence from the prior. The sample is fixed in evaluation.

        Args:
            inputs: (B, d + C), the pixels followed by the one-hot class.
        """
        targets, classes = inputs[:, : self.pixels], inputs[:, self.pixels :]
        means, log_variances = self.encoder(inputs).chunk(2, dim=1)
        samples = means + torch.exp(0.5 * log_variances) * self._noise(means)
        logits = self.decode(samples, classes)
        pixels = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(1)
        divergence = 0.5 * (means.square() + log_variances.exp() - 1.0 - log_variances).sum(1)
        return means, torch.stack([pixels, divergence], dim=1)

    def decode(self, latents: Tensor, classes: Tensor) -> Tensor:
        """Return the logits of the pixels (B, d) of latents (B, latent) and one-hot classes."""
        logits: Tensor = self.decoder(torch.cat([latents, classes], dim=1))
        return logits

    def _noise(self, like: Tensor) -> Tensor:
        if self.training:
            return torch.randn_like(like)
        drawn = torch.randn(like.shape, generator=torch.Generator().manual_seed(0))
        return drawn.to(like)


def cvae(input_shape: Shape, num_classes: int, *, head_bias: bool | None) -> CVAE:
    """Return the auto-encoder; it has no head, so ``head_bias`` is ignored."""
    return CVAE(math.prod(input_shape), num_classes)


def _layers(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
