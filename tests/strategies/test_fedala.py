"""FedALA: the mixing weights by hand and by their slope, and on which examples."""

import pytest
import torch
from torch.nn import functional as F

from fedhet.strategies.base import LocalSummary
from fedhet.strategies.fedala import LOCAL, MIXING, FedALA
from tests.federation import Regression, TensorBatches, half_squared_error
from tests.strategies.labelled import Classifier, blobs, context_of
from tests.strategies.sides import client_side

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
    """At the global model the prediction is -1, its error 2, and the slope in A 2 (3, -4)."""
    model, start = Regression(2), torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    model.head.weight.data.copy_(start)
    inputs = torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(examples, 1)
    data = TensorBatches(inputs, torch.full((examples,), -3.0, dtype=torch.float64))
    state = {LOCAL: {"head.weight": torch.zeros(1, 2, dtype=torch.float64)}}
    side = client_side(FedALA, eta=eta, data_share=1.0)
    context = context_of(model, data, state=state, loss=half_squared_error, batch_size=1)
    side.begin(context)
    expected = torch.tensor([mixing], dtype=torch.float64)
    torch.testing.assert_close(state[MIXING]["head.weight"], expected)
    torch.testing.assert_close(model.head.weight.detach(), expected * start)
    torch.testing.assert_close(context.start["head.weight"], expected * start)
    model.head.weight.data.fill_(9.0)
    assert side.end(context, LocalSummary(1, 1, 0.1)) == {}
    model.head.weight.data.zero_()
    assert state[LOCAL]["head.weight"].tolist() == [[9.0, 9.0]]


def test_the_step_is_down_the_slope_of_the_loss_in_eval_mode():
    """With the start w_l + (w_g - w_l) A, the slope in A is its own times w_g - w_l."""
    model, generator = Classifier(), torch.Generator().manual_seed(0)
    data = blobs(1)[0]
    received = {name: value.clone() for name, value in model.state_dict().items()}
    local = {n: torch.randn(received[n].shape, generator=generator) for n in HEAD}
    state = {LOCAL: local, MIXING: {n: torch.full_like(v, 0.5) for n, v in local.items()}}
    side = client_side(FedALA, eta=0.1, data_share=1.0)
    side.begin(context_of(model, data, state=state, batch_size=100))
    probe = Classifier().eval()
    probe.load_state_dict({**received, **{n: (local[n] + received[n]) / 2 for n in HEAD}})
    F.cross_entropy(probe(data.inputs)[1], data.labels).backward()
    for name in HEAD:
        step = -0.1 * probe.get_parameter(name).grad * (received[name] - local[name])
        torch.testing.assert_close(state[MIXING][name], 0.5 + step)


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
    (seen,) = passes_of(client_side(FedALA, data_share=share), fresh())
    assert len(seen) == len(set(seen)) == count
    (other,) = passes_of(client_side(FedALA, data_share=share), fresh(), seed=1)
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
    side, state = client_side(FedALA, eta=0.0, until_std=0.1), fresh()
    passes = passes_of(side, state, loss_of_pass)
    assert len(passes) == count
    assert all(seen == passes[0] for seen in passes)
    assert len(passes_of(side, state)) == 1
