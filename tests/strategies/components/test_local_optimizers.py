"""Our SGD against torch.optim.SGD, step by step."""

from __future__ import annotations

import pytest
import torch

from strategies.components.local_optimizers import SGD


def params_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "unused": (2,), "head.weight": (2, 4)}
    return {
        name: torch.randn(shape, generator=generator).requires_grad_()
        for name, shape in shapes.items()
    }


def loss_of(params: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(inputs @ params["body.weight"].T + params["body.bias"])
    return (hidden @ params["head.weight"].T).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize(("momentum", "layers"), [(0.0, "all"), (0.9, "all"), (0.9, "first:3")])
def test_the_same_bits_as_torch(momentum, layers, weight_decay):
    ours, theirs = params_of(3), params_of(3)
    optimizer = SGD(momentum, weight_decay, layers)
    optimizer.start(ours, lr=0.3)
    moved = set(optimizer.stateful(list(theirs)))
    assert len(moved) == (0 if momentum == 0 else 4 if layers == "all" else 3)
    groups = [{"params": [p], "momentum": momentum * (n in moved)} for n, p in theirs.items()]
    reference = torch.optim.SGD(groups, lr=0.3, weight_decay=weight_decay)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        inputs = torch.randn(6, 3, generator=generator)
        reference.zero_grad()
        loss_of(theirs, inputs).backward()
        reference.step()

        def backward(batch):
            for param in ours.values():
                param.grad = None
            loss_of(ours, batch).backward()

        optimizer.step(lambda inputs=inputs: inputs, backward, lambda: None)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert torch.equal(ours["unused"], params_of(3)["unused"])
    assert not torch.equal(ours["head.weight"], params_of(3)["head.weight"])
