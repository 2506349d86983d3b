"""FedALA: the mixing weights by hand and by finite differences, and when it is FedAvg."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from strategies.base import LocalSummary
from strategies.fedala import LOCAL, MIXING, FedALA, FedALAClient
from strategies.fedavg import FedAvg
from tests.federation import Regression, TensorBatches, half_squared_error
from tests.strategies.labelled import Classifier, blobs, context_of, train

HEAD = ["head.weight", "head.bias"]


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
    """Global model (1, -1), w_local = (0, 0), examples x = (3, 4) with target -3, one a batch.

    At the global model the prediction is -1, its error 2, and the slope in A is 2 (3, -4).
    The start is A times the global model; what is kept is a copy of the model after training.
    """
    model, start = Regression(2), torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    model.head.weight.data.copy_(start)
    inputs = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(examples, 1)
    data = TensorBatches(inputs, torch.full((examples,), -3.0, dtype=torch.float64))
    state = {LOCAL: {"head.weight": torch.zeros(1, 2, dtype=torch.float64)}}
    side = FedALAClient(eta=eta, data_share=1.0)
    context = context_of(model, data, state=state, loss=half_squared_error, batch_size=1)
    side.begin(context)
    expected = torch.tensor([mixing], dtype=torch.float64)
    torch.testing.assert_close(state[MIXING]["head.weight"], expected)
    torch.testing.assert_close(model.head.weight.detach(), expected * start)
    model.head.weight.data.fill_(9.0)
    assert side.end(context, LocalSummary(1, 1, 0.1)) == {}
    model.head.weight.data.zero_()
    assert state[LOCAL]["head.weight"].tolist() == [[9.0, 9.0]]


def test_the_step_is_down_the_slope_of_the_loss_in_eval_mode():
    """Against central differences in every element of A, in float64, on a network with dropout."""
    model, generator = Classifier().double(), torch.Generator().manual_seed(0)
    data = blobs(1)[0]
    data = TensorBatches(data.inputs.double(), data.labels, num_classes=3)
    received = {name: value.clone() for name, value in model.state_dict().items()}
    local = {n: torch.randn(received[n].shape, generator=generator).double() for n in HEAD}
    half = {name: torch.full_like(value, 0.5) for name, value in local.items()}
    state = {LOCAL: local, MIXING: half}
    side = FedALAClient(eta=1e-3, data_share=1.0)
    side.begin(context_of(model, data, state=state, batch_size=100))

    def loss_at(mixing):
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


def passes_of(side, state, loss_of_pass=lambda number: 0.0, seed=0):
    """Return which of ten examples each pass sees, in the order seen, in batches of three."""
    passes = [[]]
    numbers = torch.arange(10, dtype=torch.float64)

    def loss(logits, labels):
        if set(labels.int().tolist()) & set(passes[-1]):
            passes.append([])
        passes[-1] += labels.int().tolist()
        return logits.sum() + loss_of_pass(len(passes))

    data = TensorBatches(numbers[:, None], numbers)
    side.begin(context_of(Regression(1), data, seed, state=state, loss=loss, batch_size=3))
    return passes


def fresh():
    return {LOCAL: {"head.weight": torch.zeros(1, 1, dtype=torch.float64)}}


@pytest.mark.parametrize(("share", "count"), [(0.8, 8), (1.0, 10), (0.01, 1), (0.3, 3)])
def test_it_learns_on_a_drawn_share_of_the_examples(share, count):
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


@pytest.mark.slow
def test_the_first_round_is_fedavg_and_the_second_is_not():
    for rounds in (1, 2):
        mixed, _ = train(FedALA(local_lr=0.1), rounds, Classifier)
        plain, _ = train(FedAvg(local_lr=0.1), rounds, Classifier)
        assert torch.equal(mixed["head.weight"], plain["head.weight"]) == (rounds == 1)
