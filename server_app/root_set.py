"""The server's own examples under strategy/aggregator=fltrust, and its training on them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fedhet.common.errors import ConfigError
from fedhet.conf import build_local_optimizer, build_part
from fedhet.strategies.base import LocalContext, LocalOptimizer, subtract
from fedhet.strategies.components.local_training import seeded, train_locally
from fedhet.strategies.components.local_training_config import (
    LocalTrainingConfig,
    local_training_config,
)
from fedhet.strategies.components.tensor_selection import TensorSelector, trainable_shared
from fedhet.strategies.modes.robust.aggregator import KEY
from fedhet.strategies.modes.robust.fltrust import FLTrust
from fedhet.strategies.slots import Schedule
from fedhet.tasks import AnyTask
from fedhet.tasks.evaluation import Batched
from fedhet.tasks.examples import Examples
from fedhet.tasks.masked import MaskedData
from fedhet.tasks.references import load_reference
from fedhet.tasks.task import kind_of

_STREAM = 0xF17  # keeps the choice of examples independent of every other use of the run's seed
_BATCH = 500


@dataclass
class RootSet:
    """Local training at the server, by the recipe's local settings and without sides.

    Attributes:
        examples: of the root set.
        loss: of the task.
        optimizer: a prototype.
        options: of the recipe's local training.
        lr: t -> eta_l.
        shared: names of the tensors that Delta has.
        seed: of the run; batches are drawn as for a client with the number after the last.
        number: of that client.
    """

    examples: Examples
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: LocalOptimizer
    options: LocalTrainingConfig
    lr: Callable[[int], float]
    shared: list[str]
    seed: int
    number: int

    def __call__(self, model: nn.Module, round: int) -> dict[str, Tensor]:
        """Return y_0 - x of one round's training from ``model``, which stays as it is."""
        local = copy.deepcopy(model).requires_grad_(True)
        device = next(local.parameters()).device
        with torch.enable_grad(), seeded(self.seed, round, self.number, device) as (draw, sides):
            context = LocalContext(
                model=local,
                loaded=model.state_dict(),
                shared=self.shared,
                received={},
                state={},
                data=self.examples,
                loss=self.loss,
                round=round,
                batch_size=self.options.batch_size,
                lr=self.lr(round),
            )
            context.generator = sides
            optimizer = copy.deepcopy(self.optimizer)
            train_locally(context, [], optimizer, self.options, draw)
        trained = {name: context.params[name].detach() for name in self.shared}
        return {name: value.cpu() for name, value in subtract(trained, context.anchor).items()}


def root_set_of(
    recipe: DictConfig, task: AnyTask, model: nn.Module, test: Batched | None
) -> tuple[RootSet | None, Batched | None]:
    """Return the root set that the recipe's aggregator needs, if any, and the test examples left.

    Raises:
        ConfigError: if there are no test examples to take, or too few.
    """
    tensors = task.classifier_tensors
    aggregator = build_part(recipe, "strategy.aggregator", tensors)
    if not isinstance(aggregator, FLTrust):
        return None, test
    if recipe.local.initial == "own" or recipe.local.reuse_training:
        raise ConfigError(
            f"{KEY} FLTrust compares updates from one start: set local.initial=received and "
            "local.reuse_training=null, or choose another aggregator"
        )
    device = next(model.parameters()).device
    examples, rest = _examples(aggregator, task, test, device, int(recipe.seed))
    schedule: Schedule = build_part(recipe, "schedule", tensors)
    rounds, lr = int(recipe.rounds), float(recipe.local.lr)
    root = RootSet(
        examples,
        task.loss,
        build_local_optimizer(recipe, tensors),
        local_training_config(recipe.local, recipe.strategy.phases),
        lambda round: lr * schedule(round, rounds),
        list(trainable_shared(model, TensorSelector(recipe.strategy.personal))),
        int(recipe.seed),
        int(recipe.clients),
    )
    return root, rest


def _examples(
    aggregator: FLTrust, task: AnyTask, test: Batched | None, device: torch.device, seed: int
) -> tuple[Examples, Batched | None]:
    kind = kind_of(task.config)
    if kind is None:
        raise ConfigError(f"{KEY} FLTrust needs inputs and targets, and task={task.name} has none")
    examples = partial(
        Examples,
        kind=kind,
        num_classes=task.num_classes,
        any_label=task.any_label,
        device=device,
    )
    if aggregator.data is not None:
        given = load_reference(f"{KEY}.data", aggregator.data)()
        return examples(given), test
    if test is None:
        raise ConfigError(
            f"{KEY} FLTrust takes its root set from the server's test examples, and there are "
            f"none: set {KEY}.data=package.module:function, or task.test_data"
        )
    share = aggregator.root * len(test) if aggregator.root < 1 else aggregator.root
    size = max(1, int(share + 0.5))
    if size >= len(test):
        raise ConfigError(
            f"{KEY}.root={aggregator.root:g} is not allowed: the server has {len(test)} test "
            "examples, and some must be left to test on; set it lower"
        )
    chosen = np.random.default_rng([_STREAM, seed]).choice(len(test), size, replace=False)
    kept = torch.ones(len(test), dtype=torch.bool)
    kept[torch.from_numpy(chosen)] = False
    batches = list(MaskedData(test, ~kept).batches(_BATCH, generator=None, train=False))
    inputs, labels = (torch.cat(parts).cpu().numpy() for parts in zip(*batches, strict=True))
    return examples((inputs, labels)), MaskedData(test, kept)
