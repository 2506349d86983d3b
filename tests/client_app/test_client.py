"""FederatedClient by its NumPyClient contract, and the local training loop by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch.nn import functional as F

from fedhet.client_app.client import FederatedClient
from fedhet.client_app.state import ContextStateStore
from fedhet.strategies.base import ClientSide
from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.components.local_training import seeded
from fedhet.strategies.components.local_training_config import LocalTrainingConfig, Phase
from fedhet.strategies.components.tensor_selection import TensorSelector, shared_names
from tests.federation import Regression, TensorBatches, client_of, half_squared_error
from tests.refused import refused
from tests.strategies.labelled import Classifier, blobs
from tests.strategies.test_closed_forms import Shifted

CONFIG = {"round": 1, "lr": 0.1}


def client(model=None, data=None, **how) -> FederatedClient:
    """One example, x = (3, 4), target -10: the gradient at w = 0 is (30, 40), norm 50."""
    if data is None:
        data = TensorBatches(torch.tensor([[3.0, 4.0]]).double(), torch.tensor([-10.0]).double())
    return client_of(model or Regression(2), data, how.pop("loss", half_squared_error), **how)


def fit(start=(0.0, 0.0), config=CONFIG, **how):
    arrays, _, metrics = client(**how).fit([np.array([start])], dict(config))
    return arrays[0][0], metrics


class Autoencoder(torch.nn.Module):
    """One matrix in two places, beside a buffer of its own that is not stored."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, False)
        self.decoder.weight = self.encoder.weight
        self.head = torch.nn.Linear(1, 1, bias=False)
        self.register_buffer("one", torch.ones(1), persistent=False)
        torch.nn.init.ones_(self.head.weight)

    def forward(self, inputs):
        features = self.decoder(self.encoder(self.one * inputs))
        return features, self.head(features)


def test_tied_tensors_travel_once_and_buffers_that_are_not_stored_stay():
    data = TensorBatches(torch.ones(1, 1), torch.zeros(1))
    one = client(Autoencoder(), data)
    assert one.shared.shared_names == ["encoder.weight", "head.weight"]
    start = [np.full((1, 1), 2.0, np.float32), np.ones((1, 1), np.float32)]
    loss, _, _ = one.evaluate(start, dict(CONFIG))
    assert loss == 0.5 * 4.0**2  # w^2 = 4, and not the initial w
    context = one._context({}, 1, 0.1, torch.Generator())
    features = context.received_features(torch.ones(1, 1))
    assert features.item() == 4.0  # of the received model, which MOON and FedMRUR compare with
    (tied, head), _, _ = one.fit(start, {**CONFIG, "lr": 0.01})
    # of (h w^2)^2 / 2 the gradients are 2 h^2 w^3 and h w^4
    assert tied.item() == pytest.approx(2.0 - 0.01 * 16)
    assert head.item() == pytest.approx(1.0 - 0.01 * 16)


def test_a_model_in_bfloat16_is_refused_by_the_tensor_that_would_travel():
    model = Autoencoder()
    model.head.bfloat16()
    with refused("head.weight", "torch.bfloat16"):
        client(model, TensorBatches(torch.ones(1, 1), torch.zeros(1)))
    own = TensorSelector("head.*")  # what stays may have any type
    assert shared_names(model, own) == ["encoder.weight"]


class Counting(torch.nn.Module):
    """Has buffers of its own that no state holds: one changed in place, one replaced."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(1, 1, bias=False)
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.register_buffer("mean", torch.zeros(1), persistent=False)

    def forward(self, inputs):
        self.seen += 1
        self.mean = 0.5 * self.mean + inputs.mean()
        return inputs, self.head(inputs) + self.seen + self.mean


def test_what_no_state_holds_does_not_pass_from_one_message_to_the_next():
    data = TensorBatches(torch.ones(1, 1), torch.zeros(1))
    one = client(Counting(), data)
    start, config = [np.ones((1, 1), np.float32)], {**CONFIG, "lr": 0.1}
    first, _, _ = one.fit(start, config)
    again = replace(one, client_id=1, store=ContextStateStore(RecordDict()))
    second, _, _ = again.fit(start, config)
    assert np.array_equal(first[0], second[0])


class Shift(ClientSide):
    def correct(self, grads, context):
        grads["head.weight"].add_(torch.tensor([[-30.0, 0.0]]))


CLIP = LocalTrainingConfig(clip=5.0)


@pytest.mark.parametrize(
    ("start", "how", "end"),
    [
        ((0.0, 0.0), {}, [-3.0, -4.0]),
        ((0.0, 0.0), {"options": CLIP}, [-0.3, -0.4]),  # the gradient has norm 50: (3, 4) is left
        # g = 3 (3, 4) is clipped to (3, 4) before 0.5 w is added
        ((-1.0, -1.0), {"options": CLIP, "optimizer": SGD(weight_decay=0.5)}, [-1.25, -1.35]),
        # (30, 40) + (-30, 0) = (0, 40), clipped to (0, 5)
        ((0.0, 0.0), {"options": CLIP, "sides": {"shift": Shift()}}, [0.0, -0.5]),
    ],
    ids=["plain", "clipped", "decay_after_clipping", "correction_before_clipping"],
)
def test_one_step_by_hand(start, how, end):
    weights, metrics = fit(start, config={**CONFIG, "evaluate-received": True}, **how)
    np.testing.assert_allclose(weights, end, rtol=1e-6, atol=1e-7)
    assert (metrics["num-steps"], metrics["lr-sum"]) == (1, 0.1)
    loss = 50.0 if start == (0.0, 0.0) else 4.5
    assert metrics["train-loss"] == metrics["received-loss"] == loss


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (LocalTrainingConfig(batch_size=8, epochs=2), 6),  # 17 examples: 8, 8, 1
        (LocalTrainingConfig(batch_size=8, epochs=2, drop_last=True), 4),
        (LocalTrainingConfig(batch_size=100, epochs=1, drop_last=True), 1),  # the only batch stays
        (LocalTrainingConfig(batch_size=8, epochs=None, steps=5), 5),
    ],
)
def test_steps_are_counted_as_taken(options, steps):
    one = client(Classifier(), blobs(1)[0], loss=F.cross_entropy, options=options)
    _, num_examples, metrics = one.fit(one.get_parameters({}), {"round": 1, "lr": 0.25})
    assert (num_examples, metrics["num-steps"], metrics["lr-sum"]) == (17, steps, 0.25 * steps)


@pytest.mark.parametrize("optimizer", [SGD(momentum=0.9), Adam()])
def test_optimizer_state_does_not_survive_the_round(optimizer):
    one = client(optimizer=optimizer, options=LocalTrainingConfig(epochs=3))
    first, second = (one.fit([np.zeros((1, 2))], dict(CONFIG))[0] for _ in range(2))
    np.testing.assert_array_equal(first[0], second[0])


def test_the_global_random_state_is_left_alone():
    one = client(Classifier(), blobs(1)[0], loss=F.cross_entropy)
    start = one.get_parameters({})
    results = []
    for seed, round in ((5, 1), (6, 1), (6, 2)):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        results.append(np.concatenate(one.fit(start, {**CONFIG, "round": round})[0], axis=None))
        assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(results[0], results[1])
    assert not np.array_equal(results[0], results[2])


def test_the_global_model_is_the_one_received_even_if_asked_for_late():
    seen = []

    class Late(ClientSide):
        def end(self, context, summary):
            seen.append(context.global_model.head.weight.clone())
            return {}

    fit((7.0, 8.0), sides={"late": Late()})
    assert seen[0].tolist() == [[7.0, 8.0]]
    assert not seen[0].requires_grad


class Careless(ClientSide):
    """A side of a user's that keeps, sends or adds what cannot be kept, sent or added."""

    def __init__(self, keeps=None, sends=(), adds=None):
        self.keeps, self.sent_values, self.adds = keeps or {}, sends, adds

    def penalty(self, step):
        return self.adds

    def end(self, context, summary):
        context.state.update(self.keeps)
        return self.sent_values


@pytest.mark.parametrize(
    ("side", "message"),
    [
        (Careless({"mine/c": {"n": torch.ones(1)}}, {}), "mine/c']"),
        (Careless({"n": 3.0}, {}), "state['n'] float"),
        (Careless({"n": {"x": 1}}, {}), "state['n'] dict"),
        (Careless(sends=None), "strategy=own NoneType"),
        (Careless(sends={}, adds=torch.ones(2)), "2"),
    ],
)
def test_what_a_side_cannot_keep_send_or_add_is_refused_by_name(side, message):
    with refused(*message.split()):
        fit(sides={"own": side})


def test_a_rebound_client_is_as_new():
    model = Regression(2)
    first = client(model, personal=TensorSelector("all"))
    first.fit([], dict(CONFIG))
    first.evaluate([], {"state-round": 1})
    assert not torch.equal(model.head.weight, torch.zeros(1, 2, dtype=torch.float64))
    model.requires_grad_(False)  # as a side may that trains in phases
    store = ContextStateStore(RecordDict())
    second = replace(first, client_id=7, store=store)
    assert (second.client_id, first.client_id) == (7, 0)
    weight = model.head.weight
    assert (model.training, weight.grad, weight.requires_grad) == (True, None, True)
    assert second.fit([], dict(CONFIG))[2]["train-loss"] == 50.0
    assert store.load("experiment", 1)
    first = client(model.requires_grad_(False))  # frozen from the start
    assert not replace(first, client_id=1).shared.model.head.weight.requires_grad


def test_a_client_may_start_from_its_own_initialisation():
    built, model = [], Regression(2)
    torch.nn.init.constant_(model.head.weight, 100.0)

    def build(seed):
        built.append(seed)
        return model

    how = {"build": build, "options": LocalTrainingConfig(initial="own", epochs=1)}
    for client_id, round, start in ((0, 1, 100.0), (0, 2, 0.0), (1, 1, 100.0)):
        weights, _ = fit(config={"round": round, "lr": 1e-9}, client_id=client_id, **how)
        assert weights.tolist() == pytest.approx([start, start], abs=1e-3)
    assert len(set(built)) == 2 == len(built)


def test_a_client_that_trains_only_what_it_keeps_counts_the_steps_of_that():
    """Of no shared tensor's steps it would send an lr-sum of 0, which no reply may have."""
    options = LocalTrainingConfig(batch_size=1, epochs=1, phases=(Phase(TensorSelector("head.*")),))
    kept = client(Shifted(2), personal=TensorSelector("head.*"), options=options)
    _, _, metrics = kept.fit(kept.get_parameters({}), CONFIG)
    assert metrics["lr-sum"] == pytest.approx(0.1 * metrics["num-steps"])
    assert metrics["num-steps"] > 0


def test_every_client_and_round_has_draws_of_its_own():
    def drawn(seed: int, round: int, client: int) -> list[float]:
        with seeded(seed, round, client, torch.device("cpu")) as (batches, sides):
            numbers = [torch.rand(2, generator=one) for one in (batches, sides, None)]
        return torch.cat(numbers).tolist()

    places = [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]
    found = [drawn(*place) for place in places]
    assert drawn(*places[0]) == found[0]
    assert len({number for numbers in found for number in numbers}) == 6 * len(places)
