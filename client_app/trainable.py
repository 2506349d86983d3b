"""Whether a client can train at all, said at the registration and not in every round."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fedhet.strategies.base import ClientData, LocalOptimizer
from fedhet.strategies.components.local_training_config import LocalTrainingConfig


def why_not(
    model: nn.Module, data: ClientData, options: LocalTrainingConfig, optimizer: LocalOptimizer
) -> str:
    """Return why training on these examples must fail; empty if nothing speaks against it.

    The text has no number of examples: under secure aggregation the server must not learn it.
    """
    if len(data) == 0:
        return "no training example"
    needed = optimizer.batches_per_step
    batches = options.batches(len(data))
    lengths = [phase.epochs for phase in options.schedule()]
    if any(length is not None and length * batches < needed for length in lengths):
        return (
            f"a step takes {needed} batches, and there are fewer in local.epochs: raise that, or "
            "lower local.batch_size"
        )
    if options.smallest_batch(len(data)) == 1 and not _takes_one(model, data):
        return (
            "a batch of one example, which the model cannot normalise (BatchNorm): set "
            "local.drop_last=true or another local.batch_size; a client with a single example "
            "needs more, or a model without BatchNorm"
        )
    return ""


@torch.no_grad()
def _takes_one(model: nn.Module, data: ClientData) -> bool:
    """Return whether the model can be trained on a batch of one example."""
    if not any(isinstance(module, _NormBase | nn.GroupNorm) for module in model.modules()):
        return True
    inputs, labels = next(iter(data.batches(1, generator=None, train=False)))
    on_gpu = [labels.device] if labels.device.type == "cuda" else []
    with torch.random.fork_rng(on_gpu):
        try:
            copy.deepcopy(model).train()(inputs)
        except ValueError:  # "Expected more than 1 value per channel when training"
            return False
    return True
