"""Linear CKA against its definition, whatever the batches are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.errors import ConfigError
from strategies.statistics.linear_cka import FeatureProducts, layers_of, similarities


def cka_of(left: Tensor, right: Tensor) -> float:
    """The definition (Kornblith et al., eq. 3 to 5), by n x n Gram matrices and not by features."""
    n = len(left)
    centring = torch.eye(n, dtype=torch.float64) - 1 / n
    grams = [centring @ (x.double() @ x.double().T) @ centring for x in (left, right)]
    inner = (grams[0] * grams[1]).sum()
    return float(inner / (grams[0].norm() * grams[1].norm()))


def added(features: Tensor, sizes: list[int]) -> Tensor:
    """CKA of features (N, n, p) that come in batches of these sizes."""
    products = FeatureProducts()
    for batch in features.split(sizes, dim=1):
        products.add(batch)
    return products.cka()


def features_of(models: int = 3, count: int = 23, width: int = 5, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(count, width, generator=generator)
    noise = torch.randn(models, count, width, generator=generator)
    return base + 0.7 * noise + offset * torch.arange(1, models + 1).view(-1, 1, 1)


@pytest.mark.parametrize("sizes", [[23], [10, 10, 3], [1] * 23])
@pytest.mark.parametrize("width", [1, 5, 40])  # more features than examples, too
def test_it_is_the_definition_for_every_pair_and_in_any_batches(sizes, width):
    features = features_of(width=width)
    found = added(features, sizes)
    expected = [[cka_of(left, right) for right in features] for left in features]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_what_all_examples_have_in_common_does_not_count():
    """Features of a hundred thousand and some: the products alone would keep no digit of these."""
    plain, far = features_of(), features_of(offset=1e5).double()
    assert added(far.float(), [7, 7, 9])[0, 1] == pytest.approx(
        float(added(plain, [23])[0, 1]), abs=1e-3
    )


def test_rotated_and_scaled_features_are_the_same_and_constant_ones_have_none():
    features = features_of(1)[0].double()
    rotation = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    constant = torch.ones_like(features)
    found = added(torch.stack([features, 3 * features @ rotation, constant]), [11, 12])
    assert found[0, 1] == pytest.approx(1.0)
    assert found[:2, 2].isnan().all()


class Small(nn.Module):
    """A map of 3 channels and a linear layer, each followed by an in-place ReLU, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Conv2d(1, 3, 3)
        self.relu = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(3 * 4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.relu(self.map(inputs))
        return self.head(self.relu(self.hidden(self.drop(maps.flatten(1)))))


def test_models_are_compared_at_each_layers_own_output():
    torch.manual_seed(0)
    models = [Small().eval() for _ in range(3)]
    inputs = torch.randn(17, 1, 4, 4)
    clients = [model.state_dict() for model in models]
    network = Small().train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found = similarities(network, clients, ["map", "hidden", "head"], inputs.split(5))
    with torch.no_grad():
        maps = [model.map(inputs).mean(dim=(2, 3)) for model in models]
        hidden = [model.hidden(model.map(inputs).relu().flatten(1)) for model in models]
        outputs = [model(inputs) for model in models]
    assert found["map"][0, 2] == pytest.approx(cka_of(maps[0], maps[2]), abs=1e-6)
    assert found["hidden"][0, 1] == pytest.approx(cka_of(hidden[0], hidden[1]), abs=1e-6)
    assert found["head"][1, 2] == pytest.approx(cka_of(outputs[1], outputs[2]), abs=1e-6)
    assert network.training
    assert not network.map._forward_hooks
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name])


def test_layers_are_those_of_the_tensors_each_once():
    assert layers_of(["a.0.weight", "a.0.bias", "head.weight"]) == ["a.0", "head"]


def test_a_layer_without_features_is_refused_by_name():
    network = nn.Sequential(nn.LSTM(3, 2), nn.Identity())

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = network[0]

        def forward(self, inputs: Tensor) -> Tensor:
            return self.body(inputs)[0]

    with pytest.raises(ConfigError, match=r"diagnostics\.cka .*body, a LSTM"):
        similarities(First(), [{}], ["body"], [torch.randn(2, 4, 3)])
