"""DENSE's two stages: images generated against an ensemble, and a student distilled from it.

A generator makes the images from noise; both stages see random views of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.fusion.mean_logits import MeanLogits

LOSSES = ("one_hot", "bn", "adversarial")


def divergence(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """Return tau^2 KL(softmax(teacher / tau) || softmax(student / tau)) of logits (B, C), (B,)."""
    predicted = F.log_softmax(student / temperature, dim=1)
    # the target as a logarithm: a probability that rounds to 0 would have the gradient NaN
    target = F.log_softmax(teacher / temperature, dim=1)
    return temperature**2 * F.kl_div(predicted, target, reduction="none", log_target=True).sum(1)


def disagreement(student: Tensor, teacher: Tensor) -> Tensor:
    """Return L_div <= 0 of logits (B, C): minus the divergence of rows whose classes differ."""
    differ = student.argmax(1) != teacher.argmax(1)
    return -(divergence(student, teacher) * differ).mean()


@contextmanager
def statistics_gaps(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect ||mean - running mean|| + ||var - running var|| of every BatchNorm layer used."""
    gaps: list[Tensor] = []

    def note(layer: _BatchNorm, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert layer.running_mean is not None
        assert layer.running_var is not None
        others = [dim for dim in range(inputs[0].dim()) if dim != 1]
        var, mean = torch.var_mean(inputs[0], dim=others, correction=0)
        gaps.append((layer.running_mean - mean).norm() + (layer.running_var - var).norm())

    with ExitStack() as hooks:
        for layer in model.modules():
            if isinstance(layer, _BatchNorm) and layer.track_running_stats:
                hooks.enter_context(layer.register_forward_hook(note))
        yield gaps


@dataclass(frozen=True)
class Generation:
    """Settings of an epoch's images; strategies/dense.py says what they mean."""

    steps: int
    images: int
    latent: int
    width: int
    lr: float
    one_hot: float
    bn: float
    adversarial: float


@dataclass(frozen=True)
class Distillation:
    """Settings of the student's training by SGD."""

    batch_size: int
    lr: float
    momentum: float
    temperature: float


def generate(
    maker: Generator, teacher: MeanLogits, student: nn.Module, views: Views, how: Generation
) -> tuple[Tensor, dict[str, float]]:
    """Return an epoch's images (images, C, H, W) in [0, 1], and the losses of their step by name.

    The teacher is in eval mode. The views' generator also draws weights, noise and labels.
    """
    student.eval()
    maker.reset(views.generator)
    device, classes = views.black.device, teacher.shares.shape[1]
    noise = torch.randn(how.images, how.latent, generator=views.generator).to(device)
    labels = torch.randint(classes, (how.images,), generator=views.generator).to(device)
    trained = {**dict(maker.named_parameters()), "noise": noise.requires_grad_()}
    optimizer = Adam(betas=(0.5, 0.999))
    optimizer.start(trained, how.lr)
    lowest, best, best_losses = float("inf"), torch.empty(0), {}
    for _ in range(how.steps):
        images = maker(noise)
        inputs = views(images)
        with statistics_gaps(teacher) as gaps:
            logits = teacher(inputs)[1]
        losses = {
            "one_hot": F.cross_entropy(logits, labels),
            "bn": torch.stack(gaps).sum() if gaps else logits.new_zeros(()),
            "adversarial": disagreement(student(inputs)[1], logits),
        }
        loss = torch.stack([getattr(how, name) * value for name, value in losses.items()]).sum()
        if loss.item() < lowest:
            lowest, best = loss.item(), images.detach()
            best_losses = {name: value.item() for name, value in losses.items()}
        maker.zero_grad()
        noise.grad = None
        loss.backward(inputs=list(trained.values()))  # type: ignore[no-untyped-call]
        optimizer.move()
    return best, best_losses


def distil(
    student: nn.Module,
    teacher: MeanLogits,
    pool: Tensor,
    views: Views,
    optimizer: SGD,
    how: Distillation,
) -> dict[str, float]:
    """Train the student for a pass over the pool; return the mean divergence and agreement.

    The pool holds images (n, C, H, W) as uint8; the views' generator also draws their order.
    """
    student.train()
    lost, agreed = torch.zeros(2, device=pool.device)
    order = torch.randperm(len(pool), generator=views.generator)
    for chosen in torch.split(order, how.batch_size):
        if len(chosen) == 1 < len(pool):  # BatchNorm has no variance of a single image
            continue
        inputs = views(pool[chosen.to(pool.device)].float() / 255)
        with torch.no_grad():
            target = teacher(inputs)[1]
        logits = student(inputs)[1]
        each = divergence(logits, target, how.temperature)
        student.zero_grad()
        each.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.move()
        lost += each.detach().sum()
        agreed += (logits.argmax(1) == target.argmax(1)).sum()
    return {"divergence": float(lost) / len(pool), "agreement": float(agreed) / len(pool)}


class Generator(nn.Module):
    """Maps noise (B, z) to images (B, C, H, W) of pixels in [0, 1]; always in training mode.

    A linear layer to a quarter of the size, then twice nearest-neighbour upsampling and a 3 x 3
    convolution with BatchNorm and leaky ReLU; ``width`` channels before the last convolution.
    """

    def __init__(self, latent: int, width: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, columns = shape
        self.start = (2 * width, math.ceil(height / 4), math.ceil(columns / 4))
        self.linear = nn.Linear(latent, math.prod(self.start))
        self.blocks = nn.Sequential(
            nn.BatchNorm2d(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(size=(height, columns)),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
            nn.Sigmoid(),
        )

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Draw all weights anew: N(0, .02^2), of BatchNorm N(1, .02^2); biases are 0."""
        for module in self.modules():
            if not isinstance(module, nn.Linear | nn.Conv2d | nn.BatchNorm2d):
                continue
            mean = 1.0 if isinstance(module, nn.BatchNorm2d) else 0.0
            drawn = torch.randn(module.weight.shape, generator=generator)
            module.weight.copy_(mean + 0.02 * drawn)
            if module.bias is not None:
                module.bias.zero_()

    def forward(self, noise: Tensor) -> Tensor:
        """Return images."""
        images: Tensor = self.blocks(self.linear(noise).unflatten(1, self.start))
        return images


@dataclass(frozen=True)
class Views:
    """Turns images of pixels in [0, 1] into inputs: randomly cropped and mirrored, normalised."""

    black: Tensor  # the input value of a pixel of 0 (C, 1, 1)
    white: Tensor  # the input value of a pixel of 1
    padding: int  # width of the black border that images are cropped from; 0: no crop
    flip: bool  # mirror half of the images
    generator: torch.Generator

    def __call__(self, images: Tensor) -> Tensor:
        """Return inputs (B, C, H, W); the gradient passes through."""
        return self.black + (self.white - self.black) * self.cropped(images)

    def cropped(self, images: Tensor) -> Tensor:
        """Return images cropped from copies with a black border, half of them mirrored."""
        padding, generator = self.padding, self.generator
        if not padding and not self.flip:
            return images
        count, _, height, width = images.shape
        corners = torch.randint(2 * padding + 1, (2, count, 1), generator=generator)
        mirrored = torch.zeros(count, 1)
        if self.flip:
            mirrored = torch.rand(count, 1, generator=generator) < 0.5
        rows = corners[0] + torch.arange(height)  # (B, H)
        across = torch.arange(width).expand(count, width)
        columns = corners[1] + torch.where(mirrored.bool(), across.flip(1), across)  # (B, W)
        images = F.pad(images, (padding,) * 4).permute(0, 2, 3, 1)
        which = torch.arange(count)[:, None, None].to(images.device)
        rows, columns = rows.to(images.device), columns.to(images.device)
        return images[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
