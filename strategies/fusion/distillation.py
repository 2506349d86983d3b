"""DENSE's two stages: images generated against an ensemble, and a student distilled from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.fusion.image_generator import Generator, Views
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
