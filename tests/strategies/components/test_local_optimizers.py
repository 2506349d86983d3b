"""Our SGD against torch.optim.SGD, step by step."""

import pytest
import torch

from fedhet.strategies.components.local_optimizers import SGD


def params_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"body.weight": (4, 3), "body.bias": (4,), "unused": (2,), "head.weight": (2, 4)}
    drawn = ((name, torch.randn(shape, generator=generator)) for name, shape in shapes.items())
    return {name: value.requires_grad_() for name, value in drawn}


def loss_of(params: dict[str, torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    hidden = torch.tanh(inputs @ params["body.weight"].T + params["body.bias"])
    return (hidden @ params["head.weight"].T).square().mean()


@pytest.mark.parametrize(
    ("momentum", "weight_decay", "layers", "count"),
    [(0.0, 0.0, "all", 0), (0.0, 0.01, "all", 0), (0.9, 0.01, "all", 4), (0.9, 0.0, "first:3", 3)],
)
def test_the_same_bits_as_torch(momentum, weight_decay, layers, count):
    ours, theirs = params_of(3), params_of(3)
    optimizer = SGD(momentum=momentum, weight_decay=weight_decay, momentum_layers=layers)
    optimizer.start(ours, lr=0.3)
    moved = set(optimizer.stateful(list(theirs)))
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
    assert len(moved) == count
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert torch.equal(ours["unused"], params_of(3)["unused"])
    assert not torch.equal(ours["head.weight"], params_of(3)["head.weight"])
