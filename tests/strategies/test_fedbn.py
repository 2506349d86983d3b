"""FedBN's layers, and the selector that finds them."""

import pytest
import torch
from torch import nn

from fedhet.conf import compose_overrides
from fedhet.conf.build import method_values, with_norm_layers
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.tensor_selection import (
    TensorSelector,
    norm_tensors,
    personal_names,
    shared_names,
)
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fedbn import FedBN
from tests.federation import federate
from tests.refused import refused
from tests.strategies.labelled import blobs
from tests.strategies.sides import built


class RMSNorm(nn.Module):
    """Such as those of language models, which are no subclass of PyTorch's layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LayerNorm(8), RMSNorm(8)),
            *(nn.GroupNorm(2, 8), nn.BatchNorm1d(8, affine=False), nn.Dropout(0.1)),
        )
        self.head = nn.Linear(8, 3)


def test_norm_stands_for_the_layers_whose_type_normalises():
    own = ["body.1.weight", "body.1.bias", "body.3.weight", "body.3.bias"]
    own += ["body.4.gain", "body.5.weight", "body.5.bias"]
    own += [f"body.{layer}.running_{name}" for layer in (1, 6) for name in ("mean", "var")]
    model = Net()
    assert norm_tensors(model) == personal_names(model, TensorSelector("norm")) == own
    shared = shared_names(model, TensorSelector("norm, head.*"))
    assert shared == ["body.0.weight", "body.0.bias"]
    assert TensorSelector("head.*").on(model).spec == "head.*"
    with refused("strategy.personal=norm"):
        personal_names(nn.Linear(2, 2), TensorSelector("norm"))


def test_norm_is_a_selector_wherever_a_recipe_takes_one():
    model, words = Net(), ["strategy=fedpvr", "strategy.fedpvr.layers=norm"]
    words += ["strategy.personal=norm", "diagnostics.layers='norm,head.*'"]
    words += ["strategy.phases=[{layers:norm,epochs:1},{layers:all,epochs:null}]"]
    words += ["local.momentum_layers=norm", "local.epochs=2"]
    recipe = compose_overrides(tuple(words))
    named = with_norm_layers(recipe, model)
    names = ",".join(norm_tensors(model))
    assert named.strategy.personal == named.local.momentum_layers == names
    assert named.strategy.phases[0].layers == names
    assert named.strategy.phases[1].layers == "all"
    assert named.diagnostics.layers == f"{names},head.*"
    ((_, values),) = method_values(named, 2).items()
    assert values["layers"] == names
    assert recipe.strategy.personal == "norm"
    other = compose_overrides(("strategy=fedavg",))
    assert with_norm_layers(other, model) is other


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, inputs):
        features = self.norm(inputs)
        return features, self.head(features)


@pytest.mark.slow
def test_a_client_whose_inputs_are_shifted_and_scaled_does_not_notice_with_fedbn():
    """(x - mean) / std of each client is the same with any camera: so are the shared tensors."""
    plain, shifted = blobs(), blobs()
    for client, data in enumerate(shifted):
        data.inputs = (1.0 + client) * data.inputs + 10.0 * client
    results = {}
    for kind, personal in ((FedBN, "norm"), (FedAvg, "none")):
        for name, data in (("plain", plain), ("shifted", shifted)):
            results[kind, name], _ = federate(
                built(kind, local_lr=0.1, buffers=[n for n, _ in Normed().named_buffers()]),
                data,
                model=Normed,
                loss=nn.functional.cross_entropy,
                rounds=2,
                options=LocalTrainingConfig(epochs=1, batch_size=64),
                personal=personal,
            )
    assert results[FedBN, "plain"].keys() == {"head.weight", "head.bias"}
    torch.testing.assert_close(
        results[FedBN, "plain"], results[FedBN, "shifted"], atol=1e-4, rtol=1e-4
    )
    assert "norm.running_mean" in results[FedAvg, "plain"]
    moved = results[FedAvg, "shifted"]["norm.running_mean"]
    assert float((moved - results[FedAvg, "plain"]["norm.running_mean"]).abs().max()) > 1.0
