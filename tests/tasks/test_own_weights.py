"""A run's tensors in the user's own network: adapters, removed biases, frozen weights."""

from pathlib import Path

import pytest
import torch
from torch import nn

from fedhet.common.task_settings import Lora
from fedhet.tasks.models import Head, build_own_model
from fedhet.tasks.models.own_weights import (
    counted,
    frozen_sha256,
    load_own_weights,
    model_metadata,
)
from tests.refused import refused

LORA = Lora(r=2, alpha=6, target_modules=["first"])
PATH = Path("model.safetensors")


class Net(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.first, self.out = nn.Linear(4, 5), nn.Linear(5, 3)
        self.first.requires_grad_(not frozen)

    def forward(self, inputs):
        return self.out(torch.relu(self.first(inputs)))


def seeded(seed, **how):
    torch.manual_seed(seed)
    return Net(**how)


def trained(function=Net, **how):
    """Return a run's model whose tensors have moved, and what its file would hold."""
    model = build_own_model(function, {}, {}, seed=7, **how)
    with torch.no_grad():
        for number, value in enumerate(model.parameters()):
            value += 0.1 * (number + 1)
    return model, model.state_dict(), model_metadata(model, how.get("lora"))


def outputs_of(network):
    return network(torch.arange(8.0).reshape(2, 4))


@pytest.mark.slow
def test_adapters_are_added_to_the_weights_of_a_plain_network():
    model, tensors, metadata = trained(lora=LORA)
    network = seeded(7)
    before, names = network.first.weight.clone(), network.state_dict().keys()
    load_own_weights(network, tensors, metadata, PATH)
    a, b = (tensors[f"body.first.lora_{one}.default.weight"] for one in "AB")
    torch.testing.assert_close(network.first.weight, before + 6 / 2 * b @ a)
    torch.testing.assert_close(
        outputs_of(network), model.eval()(torch.arange(8.0).reshape(2, 4))[1]
    )
    assert network.state_dict().keys() == names
    assert all(value.requires_grad for value in network.parameters())


@pytest.mark.slow
def test_adapters_do_not_go_beside_other_weights():
    _, tensors, metadata = trained(lora=LORA)
    network = seeded(8)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with refused():
        load_own_weights(network, tensors, metadata, PATH)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_frozen_weights_are_compared_where_a_network_freezes_its_own():
    _, tensors, metadata = trained(lambda: Net(frozen=True))
    load_own_weights(seeded(7, frozen=True), tensors, metadata, PATH)
    for other in (seeded(8, frozen=True), seeded(7)):
        with refused():
            load_own_weights(other, tensors, metadata, PATH)


def test_a_bias_that_the_run_did_not_have_becomes_zero():
    model, tensors, metadata = trained(head=Head(bias=False))
    network = Net()
    load_own_weights(network, tensors, metadata, PATH)
    assert not network.out.bias.any()
    torch.testing.assert_close(outputs_of(network), model(torch.arange(8.0).reshape(2, 4))[1])


def test_the_hash_of_frozen_weights_tells_values_types_and_names_apart():
    def build(seed, kind=torch.float32, **how):
        model = build_own_model(lambda: Net(frozen=True).to(kind), {}, {}, seed=seed, **how)
        return frozen_sha256(model)

    assert build(7) == build(7)
    assert len({build(7), build(8), build(7, torch.bfloat16)}) == 3
    assert frozen_sha256(build_own_model(Net, {}, {}, seed=7)) == ""


def test_a_part_of_a_model_is_loaded_if_it_is_asked_for_and_else_refused():
    """Of FedPer and the like, the server has what is shared."""
    _, tensors, metadata = trained()
    shared = {name: value for name, value in tensors.items() if not name.startswith("head.")}
    network = Net()
    before = network.out.weight.clone()
    with refused("out.bias", "out.weight"):
        load_own_weights(network, shared, metadata, PATH)
    load_own_weights(network, shared, metadata, PATH, partial=True)
    assert torch.equal(network.out.weight, before)
    assert torch.equal(network.first.weight, tensors["body.first.weight"])


def test_batchnorm_goes_on_with_the_statistics_that_were_loaded():
    """With momentum=None the running mean is that of all batches: 9 of the run, then one more."""

    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4, momentum=None)

        def forward(self, inputs):
            return super().forward(self.norm(inputs))

    _, tensors, metadata = trained(Normed)
    travels = {name: value for name, value in tensors.items() if "num_batches" not in name}
    travels["body.norm.running_mean"] = torch.full((4,), 10.0)
    network = Normed()
    load_own_weights(network, travels, counted(metadata, 9.0), PATH)
    assert int(network.norm.num_batches_tracked) == 9
    network.train()(torch.tensor([[0.0] * 4, [40.0] * 4]))
    torch.testing.assert_close(network.norm.running_mean, torch.full((4,), 11.0))
    assert counted(metadata, None) == metadata
