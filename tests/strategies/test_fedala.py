"""FedALA: the mixing weights by hand and by finite differences, and when it is FedAvg."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from strategies.base import LocalContext, LocalSummary
from strategies.components.local_training_config import LocalTrainingConfig
from strategies.fedala import LOCAL, MIXING, FedALA, FedALAClient
from strategies.fedavg import FedAvg
from tests.federation import Regression, TensorBatches, federate, half_squared_error
from tests.strategies.test_reductions import Classifier, blobs

HEAD = ["head.weight", "head.bias"]


def context_of(
    model: nn.Module, data: TensorBatches, state: dict, loss=half_squared_error, batch_size=100
) -> LocalContext:
    """Return a round in which ``model`` is the global model as received."""
    received = {name: value.clone() for name, value in model.state_dict().items()}
    return LocalContext(
        model=model,
        received_state=received,
        anchor=received,
        received={},
        state=state,
        data=data,
        loss=loss,
        round=2,
        batch_size=batch_size,
    )


def line(examples: int) -> tuple[Regression, TensorBatches, dict]:
    """Return the global model (1, -1), examples x = (3, 4) with target -3, and w_local = (0, 0).

    At the global model the prediction is -1, its error 2, and the slope in A is 2 (3, -4).
    """
    model = Regression(2)
    with torch.no_grad():
        model.head.weight.copy_(torch.tensor([[1.0, -1.0]]))
    inputs = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(examples, 1)
    data = TensorBatches(inputs, torch.full((examples,), -3.0, dtype=torch.float64))
    return model, data, {LOCAL: {"head.weight": torch.zeros(1, 2, dtype=torch.float64)}}


# ---- the mixing weights --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eta", "examples", "mixing"),
    [
        (0.05, 1, [0.7, 1.0]),  # 1 - .05 * 6; 1 + .05 * 8 is cut off
        (0.05, 2, [0.535, 1.0]),  # then from (.7, -1): error 1.1, slope (3.3, -4.4)
        (1.0, 1, [0.0, 1.0]),  # 1 - 6 is cut off
        (0.0, 1, [1.0, 1.0]),
    ],
)
def test_mixing_weights_by_hand(eta, examples, mixing):
    """One example a mini-batch. With w_local = 0 the start is A times the global model."""
    model, data, state = line(examples)
    FedALAClient(eta=eta, data_share=1.0).begin(context_of(model, data, state, batch_size=1))
    expected = torch.tensor([mixing], dtype=torch.float64)
    torch.testing.assert_close(state[MIXING]["head.weight"], expected)
    torch.testing.assert_close(
        model.head.weight.detach(), expected * torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    )


def test_the_step_is_down_the_slope_of_the_loss_in_eval_mode():
    """Against central differences in every element of A, in float64, on a network with dropout."""
    model, generator = Classifier().double(), torch.Generator().manual_seed(0)
    data = blobs(1)[0]
    data = TensorBatches(data.inputs.double(), data.labels, num_classes=3)
    received = {name: value.clone() for name, value in model.state_dict().items()}
    local = {n: torch.randn(received[n].shape, generator=generator).double() for n in HEAD}
    half = {name: torch.full_like(value, 0.5) for name, value in local.items()}
    state = {LOCAL: local, MIXING: half}
    FedALAClient(eta=1e-3, data_share=1.0).begin(context_of(model, data, state, F.cross_entropy))

    def loss_at(mixing: dict[str, Tensor]) -> Tensor:
        probe = Classifier().double().eval()
        mixed = {n: local[n] + (received[n] - local[n]) * mixing[n] for n in HEAD}
        probe.load_state_dict({**received, **mixed})
        return F.cross_entropy(probe(data.inputs)[1], data.labels)

    for name in HEAD:
        for index in range(half[name].numel()):
            ahead, behind = ({k: v.clone() for k, v in half.items()} for _ in range(2))
            ahead[name].view(-1)[index] += 1e-5
            behind[name].view(-1)[index] -= 1e-5
            with torch.no_grad():
                slope = (loss_at(ahead) - loss_at(behind)) / 2e-5
            step = state[MIXING][name].view(-1)[index] - 0.5
            torch.testing.assert_close(step, -1e-3 * slope, atol=1e-12, rtol=1e-6)


def test_it_leaves_nothing_behind_in_the_model():
    """No gradient, nothing frozen, the mode, the other tensors and torch's generator as before."""
    model = Classifier()
    state = {LOCAL: {name: torch.zeros_like(model.state_dict()[name]) for name in HEAD}}
    context = context_of(model, blobs(1)[0], state, F.cross_entropy, batch_size=8)
    before = torch.get_rng_state()
    FedALAClient().begin(context)
    assert torch.equal(before, torch.get_rng_state())
    assert model.training
    for name, param in model.named_parameters():
        assert param.requires_grad
        assert param.grad is None
        assert torch.equal(param, context.anchor[name]) != (name in HEAD)


# ---- the examples they are learnt on -------------------------------------------------------------


def passes_of(side: FedALAClient, state: dict, loss_of_pass=lambda number: 0.0, seed=0) -> list:
    """Return the examples of each pass, ten being there, in the order seen; batches of three."""
    passes: list[list[int]] = [[]]
    model = Regression(1)
    numbers = torch.arange(10, dtype=torch.float64)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        if set(labels.int().tolist()) & set(passes[-1]):
            passes.append([])
        passes[-1] += labels.int().tolist()
        return logits.sum() + loss_of_pass(len(passes))

    context = context_of(model, TensorBatches(numbers[:, None], numbers), state, loss, 3)
    context.generator.manual_seed(seed)
    side.begin(context)
    return passes


def fresh() -> dict:
    return {LOCAL: {"head.weight": torch.zeros(1, 1, dtype=torch.float64)}}


@pytest.mark.parametrize(("share", "count"), [(0.8, 8), (1.0, 10), (0.01, 1), (0.3, 3)])
def test_the_share_of_the_examples(share, count):
    (seen,) = passes_of(FedALAClient(data_share=share), fresh())
    assert len(seen) == len(set(seen)) == count
    (other,) = passes_of(FedALAClient(data_share=share), fresh(), seed=1)
    assert seen != other


@pytest.mark.parametrize(
    ("loss_of_pass", "count"),
    [
        (lambda number: 0.0, 11),  # equal losses
        (lambda number: 100.0 * max(0, 6 - number), 15),  # 5 far apart, then equal ones
        (float, 100),  # never settles
    ],
)
def test_until_std_stops_when_the_last_ten_losses_are_alike(loss_of_pass, count):
    """All passes over the same examples; later rounds have one pass."""
    side, state = FedALAClient(eta=0.0, until_std=0.1), fresh()
    passes = passes_of(side, state, loss_of_pass)
    assert len(passes) == count
    assert all(seen == passes[0] for seen in passes)
    assert len(passes_of(side, state)) == 1


# ---- FedAvg, and what is kept --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "same"), [(1, True), (2, False)])
def test_the_first_round_is_fedavg(rounds, same):
    how = {
        "model": Classifier,
        "loss": F.cross_entropy,
        "rounds": rounds,
        "options": LocalTrainingConfig(batch_size=8, epochs=2),
    }
    mixed, _ = federate(FedALA(local_lr=0.1), blobs(), **how)
    plain, _ = federate(FedAvg(local_lr=0.1), blobs(), **how)
    assert torch.equal(mixed["head.weight"], plain["head.weight"]) == same


def test_what_is_kept_is_the_model_after_training():
    model, data, state = line(1)
    side, context = FedALAClient(), context_of(model, data, state)
    side.begin(context)
    with torch.no_grad():
        model.head.weight.fill_(9.0)
    assert side.end(context, LocalSummary(1, 1, 0.1)) == {}
    assert state[LOCAL]["head.weight"].tolist() == [[9.0, 9.0]]
    with torch.no_grad():
        model.head.weight.zero_()
    assert state[LOCAL]["head.weight"].tolist() == [[9.0, 9.0]]
