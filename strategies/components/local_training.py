"""The local training loop of all methods, and its random generators."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import (
    Batch,
    ClientData,
    ClientSide,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Step,
)
from fedhet.strategies.components.local_optimizers import reach
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.tensor_selection import TensorSelector


def train_locally(
    context: LocalContext,
    sides: Sequence[ClientSide],
    optimizer: LocalOptimizer,
    options: LocalTrainingConfig,
    generator: torch.Generator,
) -> tuple[LocalSummary, float]:
    """Train ``context.model`` in place on the client's data, after the sides' ``begin``.

    ``generator`` draws the order of the examples and their augmentation.

    Returns:
        what was done, and the mean local objective over the steps (penalties included).
    """
    if not all(module.training for module in context.model.modules()):
        context.model.train()  # sets every module's mode, which takes longer than to look
    lr = context.lr
    optimizer.start(context.params, lr)
    backward = partial(_backward, context, sides, options.autocast)
    correcting = [side for side in sides if type(side).correct is not ClientSide.correct]
    correct = partial(_correct, context, correcting, options.clip)
    taken = dict.fromkeys(context.params, 0)  # steps, by tensor
    total = torch.zeros((), device=next(iter(context.params.values())).device)
    for phase in options.schedule():
        stream = _stream(context.data, options, phase.epochs, generator)
        before = context.num_steps
        with _training(context.params, phase.layers):
            while options.steps is None or context.num_steps < options.steps:
                context.first_pass = True
                try:  # an optimizer may draw several batches a step
                    loss = optimizer.step(partial(next, stream), backward, correct)
                except StopIteration:
                    break
                total = total + loss  # stays on the device
                context.num_steps += 1
        if context.num_steps == before:
            raise ValueError(
                f"{len(context.data)} examples are too few for one step on the tensors "
                f"{phase.layers.spec!r} in {phase.epochs} epochs of local.batch_size="
                f"{options.batch_size}: lower that, or raise local.epochs"
            )
        for name in phase.layers.select(context.params):
            taken[name] += context.num_steps - before
    num_steps = context.num_steps
    summary = summary_of(len(context.data), num_steps, taken, lr, optimizer)
    return summary, float(total) / max(num_steps, 1)


def summary_of(
    num_examples: int,
    num_steps: int,
    taken: Mapping[str, int],
    lr: float,
    optimizer: LocalOptimizer,
) -> LocalSummary:
    """Return what training did that took so many steps on each tensor, ``taken`` by name."""
    momenta = dict.fromkeys(optimizer.stateful(list(taken)), optimizer.momentum or 0.0)
    return LocalSummary(
        num_examples,
        num_steps,
        num_steps * lr,
        {name: steps * lr for name, steps in taken.items()},
        {name: reach(steps, momenta.get(name, 0.0)) * lr for name, steps in taken.items()},
    )


def steps_by_tensor(
    options: LocalTrainingConfig, names: Collection[str], num_steps: int
) -> dict[str, int]:
    """Return how many of K steps a finished training took on each tensor.

    Every epoch has the same number of steps, so each phase has its epochs' share of K.
    """
    phases = options.schedule()
    epochs = [phase.epochs or 1 for phase in phases]  # one that counts in steps is alone
    taken = dict.fromkeys(names, 0)
    for phase, length in zip(phases, epochs, strict=True):
        for name in phase.layers.select(names):
            taken[name] += num_steps * length // sum(epochs)
    return taken


@contextmanager
def seeded(
    seed: int, round: int, client_id: int, device: torch.device
) -> Iterator[tuple[torch.Generator, torch.Generator]]:
    """Yield generators for the batches and for the sides, and seed torch's own inside the block.

    Dropout can only draw from torch's global generator, whose state is restored afterwards.
    """
    stream = np.random.SeedSequence([seed, round, client_id]).generate_state(3, np.uint64)
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed() seeds every kind of device and takes a millisecond
        torch.default_generator.manual_seed(int(stream[0] >> 1))
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(int(stream[0] >> 1))
        batches, sides = (torch.Generator().manual_seed(int(s >> 1)) for s in stream[1:])
        yield batches, sides


def _stream(
    data: ClientData, options: LocalTrainingConfig, epochs: int | None, generator: torch.Generator
) -> Iterator[Batch]:
    for _ in itertools.count() if epochs is None else range(epochs):
        yield from data.batches(
            options.batch_size, generator=generator, train=True, drop_last=options.drop_last
        )


@contextmanager
def _training(params: Mapping[str, Tensor], layers: TensorSelector) -> Iterator[None]:
    """Freeze all other params inside the block."""
    chosen = set(layers.select(params))
    frozen = [p for name, p in params.items() if p.requires_grad and name not in chosen]
    for param in frozen:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(True)


def _backward(
    context: LocalContext, sides: Sequence[ClientSide], autocast: bool, batch: Batch
) -> Tensor:
    inputs, labels = batch
    for param in context.params.values():
        param.grad = None
    precision = torch.autocast(inputs.device.type, torch.bfloat16) if autocast else nullcontext()
    with precision:
        features, logits = context.model(inputs)
        loss = context.loss(logits, labels)
        if sides:
            step = Step(context.params, inputs, labels, features, logits, context)
            penalties = [p for p in (side.penalty(step) for side in sides) if p is not None]
            if penalties:
                penalty = sum(penalties[1:], penalties[0])
                if penalty.ndim > 0:
                    raise ConfigError(
                        f"the penalty of a client side has the shape {tuple(penalty.shape)}: it "
                        "must be a scalar, such as its .sum()"
                    )
                loss = loss + penalty
                context.measure("penalty", penalty)
                context.measure("objective", loss)
    loss.backward()  # type: ignore[no-untyped-call]
    context.first_pass = False
    return loss.detach()


def _correct(context: LocalContext, sides: Sequence[ClientSide], clip: float | None) -> None:
    if sides:  # those that correct gradients
        grads = {}
        for name, param in context.params.items():
            if param.grad is None:  # unused in this batch; corrections still apply
                param.grad = torch.zeros_like(param)
            grads[name] = param.grad
        for side in sides:
            side.correct(grads, context)
        for param in context.params.values():
            if not param.requires_grad:  # momentum would move it
                param.grad = None
    if clip is not None:
        nn.utils.clip_grad_norm_(list(context.params.values()), clip)
