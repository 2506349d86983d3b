"""Linear CKA against its definition, whatever the batches are."""

import itertools
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from fedhet.strategies.statistics.linear_cka import FeatureProducts, similarities
from tests.refused import refused


def cka_of(left: Tensor, right: Tensor) -> float:
    """The definition (Kornblith et al., eq. 3 to 5), by n x n Gram matrices and not by features."""
    centring = torch.eye(len(left), dtype=torch.float64) - 1 / len(left)
    a, b = (centring @ (x.double() @ x.double().T) @ centring for x in (left, right))
    return float((a * b).sum() / (a.norm() * b.norm()))


def added(features: Tensor, sizes: list[int]) -> Tensor:
    products = FeatureProducts()
    for batch in features.split(sizes, dim=1):
        products.add(batch)
    return products.cka()


def features_of(models: int = 3, count: int = 23, width: int = 5, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(count, width, generator=generator)
    noise = torch.randn(models, count, width, generator=generator)
    return base + 0.7 * noise + offset * torch.arange(1, models + 1).view(-1, 1, 1)


@pytest.mark.parametrize("width", [1, 5, 40])  # more features than examples, too
def test_it_is_the_definition_for_every_pair_and_in_any_batches(width):
    features = features_of(width=width)
    expected = [[cka_of(left, right) for right in features] for left in features]
    for sizes in ([23], [10, 10, 3], [1] * 23):
        found = added(features, sizes)
        torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_what_all_examples_have_in_common_does_not_count():
    """Features of a hundred thousand and some: the products alone would keep no digit of these."""
    far, plain = added(features_of(offset=1e5), [7, 7, 9]), added(features_of(), [23])
    assert far[0, 1] == pytest.approx(float(plain[0, 1]), abs=1e-3)


def test_constant_features_have_none():
    features = features_of(1)[0].double()
    found = added(torch.stack([features, 3 * features, torch.ones_like(features)]), [11, 12])
    assert found[0, 1] == pytest.approx(1.0)
    assert found[:2, 2].isnan().all()


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.map, self.relu = nn.Conv2d(1, 3, 3), nn.ReLU(inplace=True)
        self.drop, self.hidden, self.head = nn.Dropout(), nn.Linear(3 * 4, 4), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.relu(self.map(inputs))
        return self.head(self.relu(self.hidden(self.drop(maps.flatten(1)))))


def test_models_are_compared_at_each_layers_own_output():
    torch.manual_seed(0)
    models, network = [Small().eval() for _ in range(3)], Small().train()
    inputs, clients = torch.randn(17, 1, 4, 4), [model.state_dict() for model in models]
    found = similarities(network, clients, ["map", "hidden", "head"], inputs.split(5))
    with torch.no_grad():
        expected = {
            "map": [model.map(inputs).mean(dim=(2, 3)) for model in models],
            "hidden": [model.hidden(model.map(inputs).relu().flatten(1)) for model in models],
            "head": [model(inputs) for model in models],
        }
    for layer, features in expected.items():
        for i, j in itertools.combinations(range(3), 2):
            assert found[layer][i, j] == pytest.approx(cka_of(features[i], features[j]), abs=1e-6)
    assert network.training
    assert not network.map._forward_hooks


def test_a_layer_without_features_is_refused_by_name():
    network = nn.Sequential(OrderedDict(body=nn.LSTM(3, 2)))
    with refused("diagnostics.cka", "body", "LSTM"):
        similarities(network, [{}], ["body"], [torch.randn(2, 4, 3)])
