"""Which networks' neurons may change places, and that a network computes what it did."""

import pytest
import torch
from torch import nn

from fedhet.common.errors import ConfigError
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.fusion.layer_chain import Chain, read_chain, reordered
from fedhet.tasks.models import build_model
from fedhet.tasks.models.model import Model
from tests.refused import refused
from tests.strategies.fusion.test_projections import draw
from tests.strategies.sides import check_side

IMAGES = {"input_shape": (3, 32, 32), "num_classes": 10}
CHAINS = ["mlp", "fedavg_cnn", "feddw_cnn", pytest.param("vgg11", marks=pytest.mark.slow)]


def normalised() -> Model:
    by_channel = nn.BatchNorm2d(8, track_running_stats=False)
    first = nn.Conv2d(3, 8, 3, padding=1, bias=False), by_channel, nn.ReLU()
    second = nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.GroupNorm(1, 6), nn.ReLU(), nn.MaxPool2d(2)
    third = nn.Conv2d(6, 4, 3, padding=1), nn.GroupNorm(4, 4), nn.Flatten()
    body = nn.Sequential(*first, *second, *third, nn.Linear(4 * 8 * 8, 5), nn.Tanh())
    model = Model(body, 5, 10, head_bias=True)
    with torch.no_grad():
        for index, value in enumerate(model.parameters()):
            value += 0.1 * draw(*value.shape, seed=index)  # norms that are not all 1 and 0
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def any_orders(params: dict[str, torch.Tensor], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = read_chain(params)[:-1]
    return [torch.randperm(len(params[link.weight]), generator=generator) for link in hidden]


@pytest.mark.parametrize("name", [*CHAINS, "normalised"])
def test_neurons_in_another_order_compute_the_same(name):
    model = (normalised() if name == "normalised" else build_model(name, **IMAGES, seed=1)).eval()
    check_side(Chain(), model, SGD())
    params, inputs = tensors(model), draw(3, 3, 32, 32)
    features, logits = model(inputs)
    orders = any_orders(params)
    model.load_state_dict(reordered(read_chain(params), params, orders))
    moved_features, moved_logits = model(inputs)
    torch.testing.assert_close(moved_logits, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(moved_features, features[:, orders[-1]], atol=1e-4, rtol=1e-4)
    assert not torch.equal(moved_features, features)


def test_a_chain_is_read_from_names_and_shapes_or_refused():
    links = read_chain(tensors(normalised()))
    assert [link.block for link in links] == [0, 9, 9, 64, 1]
    assert [link.has_bias for link in links] == [False, True, True, True, True]
    assert [len(link.followers) for link in links] == [2, 2, 2, 0, 0]
    params = tensors(build_model("mlp", input_shape=(1, 8, 8), num_classes=10, seed=0))
    head = params.pop("head.weight")
    with refused("head.weight"):
        read_chain(params)
    del params["body.3.weight"]
    with pytest.raises(
        ConfigError,
        match=r"body\.5\.weight has 200 inputs and body\.1\.weight before it 400 outputs",
    ):
        read_chain(params | {"head.weight": head})


class Shortcut(nn.Module):
    def __init__(self, *, add=True, swap=False, softmax=False, branch=False) -> None:
        super().__init__()
        self.add, self.swap, self.softmax, self.branch = add, swap, softmax, branch
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        one, two = (self.second, self.first) if self.swap else (self.first, self.second)
        before = torch.relu(one(inputs))
        after = torch.relu(two(before))
        features = before + after if self.add else after
        features = features.softmax(1) if self.softmax else features
        if self.branch and inputs.sum() > 0:
            features = -features
        return features, self.head(features)


def network(*layers: nn.Module) -> Model:
    return Model(nn.Sequential(*layers), 4, 2, head_bias=True)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Shortcut(), "add"),
        (Shortcut(add=False, swap=True), "first.weight"),
        (Shortcut(add=False, softmax=True), "softmax"),
        (Shortcut(branch=True), "Shortcut"),
        (network(nn.Conv2d(4, 4, 3, groups=2)), "task.model"),
        (network(nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)), "2 groups"),
        (network(nn.Linear(4, 4), nn.LayerNorm(4)), "LayerNorm"),
        (network(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), "body.1"),
    ],
)
def test_what_ties_neurons_to_their_places_is_named(model, named):
    check_side(Chain(), Shortcut(add=False), SGD())
    with refused(named):
        check_side(Chain(), model, SGD())


def test_the_chain_of_a_cvae_is_its_decoder():
    model = build_model("cvae", input_shape=(1, 6, 6), num_classes=3, seed=1)
    check_side(Chain(), model, SGD())
    decoder = {n: v for n, v in tensors(model).items() if n.startswith("decoder.")}
    weights = [f"decoder.{number}.weight" for number in (0, 2, 4)]
    assert [link.weight for link in read_chain(decoder)] == weights
    latents, classes = draw(5, 20), torch.eye(3)[[0, 1, 2, 1, 0]]
    before = model.decode(latents, classes)
    moved = reordered(read_chain(decoder), decoder, any_orders(decoder))
    assert not torch.equal(moved["decoder.4.weight"], decoder["decoder.4.weight"])
    model.load_state_dict(moved, strict=False)
    torch.testing.assert_close(model.decode(latents, classes), before, atol=1e-5, rtol=1e-5)
    with refused("decoder.0.weight", "23"):
        read_chain(tensors(model))  # as if the encoder travelled, too
