"""A second model that a client trains beside y_i, on the same mini-batches."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from fedhet.strategies.base import LocalContext, Step, Tensors


def second_model(context: LocalContext, key: str) -> dict[str, Tensor]:
    """Return a copy of the model that the client state has under a key; at first, of x.

    It has the trained params, personal ones included, and all buffers.
    """
    kept = context.state.get(key)
    if kept is None:
        frozen = {name for name, param in context.params.items() if not param.requires_grad}
        kept = {name: v for name, v in context.received_state.items() if name not in frozen}
    return {name: value.clone() for name, value in kept.items()}


@torch.enable_grad()
def slopes_at(tensors: Tensors, step: Step) -> Tensors:
    """Return the gradient of the task's loss on a step's mini-batch, by trained tensor.

    Args:
        tensors: of the model at which it is taken, in train mode; its buffers are changed. Dropout
            leaves y_i's draws as they are: until y_i's next pass, every call has the same ones.
        step: of y_i, which stays as it is.
    """
    names = [name for name in tensors if name in step.params]
    at = {name: tensors[name].detach().requires_grad_() for name in names}
    device = step.inputs.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        _, logits = functional_call(step.context.model, {**tensors, **at}, (step.inputs,))
    loss = step.context.loss(logits, step.labels)
    slopes = torch.autograd.grad(loss, list(at.values()), materialize_grads=True)
    return dict(zip(names, slopes, strict=True))
