"""Phases of local training: what a phase moves, how long it is, and which are refused."""

import pytest
import torch

from fedhet.conf import compose
from fedhet.strategies.base import ClientSide
from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.components.local_training_config import (
    LocalTrainingConfig,
    Phase,
    local_training_config,
)
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.fedbabu import FedBABU
from fedhet.strategies.fedrep import FedRep
from fedhet.strategies.method import Method
from tests.recipes import overrides
from tests.refused import refused
from tests.strategies.labelled import Classifier
from tests.strategies.sides import per_fedavg
from tests.strategies.test_per_fedavg import fit


def phases_of(method: type[Method]) -> tuple[Phase, ...]:
    recipe = compose(overrides(f"strategy={method.name}"))
    return local_training_config(recipe.local, recipe.strategy.phases).phases


FEDREP, FEDBABU = phases_of(FedRep), phases_of(FedBABU)
HEAD = ["head.weight", "head.bias"]


def options_with(*phases: Phase) -> LocalTrainingConfig:
    return LocalTrainingConfig(batch_size=8, epochs=3, phases=phases)


class Shift(ClientSide):
    """Corrects every gradient, also those of frozen tensors."""

    def correct(self, grads, context):
        for grad in grads.values():
            grad.add_(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("sides", "clip"), [({}, None), ({"shift": Shift()}, 1.0)])
@pytest.mark.parametrize(
    "optimizer",
    [SGD(momentum=0.9, weight_decay=0.1), Adam(weight_decay=0.1), per_fedavg(0.1, "hessian_free")],
)
@pytest.mark.parametrize("moved", ["head", "body"])
def test_a_phase_moves_its_tensors_alone_bit_for_bit(moved, optimizer, sides, clip):
    model, start = Classifier(), Classifier().state_dict()
    phase = Phase(TensorSelector(f"{moved}.*"))
    options = LocalTrainingConfig(batch_size=8, epochs=2, clip=clip, phases=(phase,))
    fit(model, options, optimizer=optimizer, sides=sides)
    for name, param in model.named_parameters():
        assert torch.equal(param, start[name]) != name.startswith(moved)
        assert param.requires_grad
        assert name.startswith(moved) or param.grad is None


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()])
def test_momentum_of_the_first_phase_moves_nothing_in_the_second(optimizer):
    """After the head's epoch the head is what it was after a training of that epoch alone."""
    both, first = Classifier(), Classifier()
    how = {"optimizer": optimizer, "sides": {"shift": Shift()}}
    fit(both, options_with(*FEDREP), **how)
    fit(first, LocalTrainingConfig(batch_size=8, phases=FEDREP[:1]), **how)
    for name in HEAD:
        assert torch.equal(both.state_dict()[name], first.state_dict()[name])
    assert not torch.equal(both.body[0].weight, first.body[0].weight)


class Steps(ClientSide):
    def end(self, context, summary):
        """Keep how far each tensor may have moved."""
        self.taken = {name: round(sum / context.lr) for name, sum in summary.lr_sums.items()}
        return {}


def test_each_tensor_has_the_steps_of_its_own_phases():
    """17 examples are three steps an epoch: one epoch of the head, two of the body."""
    steps = Steps()
    fit(Classifier(), options_with(*FEDREP), sides={"steps": steps})
    assert {name: count for name, count in steps.taken.items() if count != 6} == {
        name: 3 for name in HEAD
    }


class Broken(ClientSide):
    def penalty(self, step):
        raise RuntimeError("broken")


def test_what_the_model_freezes_is_all_that_stays_frozen_also_after_an_error():
    model = Classifier()
    model.head.bias.requires_grad_(False)
    with pytest.raises(RuntimeError, match="broken"):
        fit(model, options_with(*FEDREP), sides={"broken": Broken()})
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]
    fit(model, options_with(*FEDREP), sides={"shift": Shift()})
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["head.bias"]
    assert torch.equal(model.head.bias, Classifier().head.bias)


@pytest.mark.parametrize(
    ("lengths", "filled"),
    [((), [5]), ((None,), [5]), ((1, None), [1, 4]), ((None, 2), [3, 2]), ((2, 3), [2, 3])],
)
def test_the_null_phase_gets_the_rest(lengths, filled):
    phases = tuple(Phase(TensorSelector("all"), length) for length in lengths)
    schedule = LocalTrainingConfig(epochs=5, phases=phases).schedule()
    assert [phase.epochs for phase in schedule] == filled


@pytest.mark.parametrize(
    ("length", "lengths", "message"),
    [
        ({"epochs": 5}, (2, 2), "[2 2] local.epochs=5"),
        ({"epochs": 5}, (5, None), "strategy.phases"),
        ({"epochs": 5}, (6,), "strategy.phases"),
        ({"epochs": 5}, (None, None), "strategy.phases"),
        ({"epochs": 5}, (0, None), "strategy.phases"),
        ({"epochs": 0}, (), "=0"),
        ({"epochs": None, "steps": 0}, (), "=0"),
        ({"epochs": None, "steps": 5}, (1, None), "local.steps=5 2 strategy.phases"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(length, lengths, message):
    phases = tuple(Phase(TensorSelector("all"), epochs) for epochs in lengths)
    with refused(*message.split()):
        LocalTrainingConfig(**length, phases=phases)


def test_one_phase_may_count_in_steps():
    model = Classifier()
    options = LocalTrainingConfig(batch_size=8, epochs=None, steps=5, phases=FEDBABU)
    assert fit(model, options)["num-steps"] == 5
    assert torch.equal(model.head.weight, Classifier().head.weight)
    assert not torch.equal(model.body[0].weight, Classifier().body[0].weight)


@pytest.mark.parametrize("phases", [(), FEDREP])
def test_a_phase_without_tensors_or_without_a_step_is_refused(phases):
    """17 examples are a batch a pass, and Per-FedAvg takes two a step: FedRep's head gets none."""
    with refused("fc3.*"):
        fit(Classifier(), options_with(Phase(TensorSelector("fc3.*"))))
    options = LocalTrainingConfig(batch_size=32, epochs=3 if phases else 1, phases=phases)
    with refused("17 examples", kind=ValueError):
        fit(Classifier(), options, optimizer=per_fedavg())
