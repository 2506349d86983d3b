"""Ditto, APFL, pFedMe and FedRoD: the client's own model by hand; it is scored, and never sent."""

import copy
import logging
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn import functional as F

from fedhet.client_app.client import FederatedClient
from fedhet.client_app.state import ContextStateStore
from fedhet.strategies.apfl import ALPHA, APFL
from fedhet.strategies.apfl import OWN as APFL_OWN
from fedhet.strategies.base import LocalContext
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.tensor_selection import tensors_of
from fedhet.strategies.ditto import OWN, Ditto
from fedhet.strategies.fedprox import FedProx
from fedhet.strategies.fedrod import HEAD, FedRoD, FedRoDClient
from fedhet.strategies.pfedme import PFedMe
from fedhet.tasks.evaluation import evaluate_model
from tests.federation import Regression, TensorBatches, half_squared_error
from tests.federation import client_of as federation_client
from tests.recipes import TINY, run_recipe
from tests.refused import refused
from tests.strategies.labelled import Classifier, assert_same, blobs, train
from tests.strategies.sides import built, client_side
from tests.strategies.test_closed_forms import stores
from tests.strategies.test_personal import WHOLE, exact, exact_blobs

LR = 0.1


def slopes(model: nn.Module, data: TensorBatches) -> list[torch.Tensor]:
    loss = F.cross_entropy(model(data.inputs)[1], data.labels)
    return list(torch.autograd.grad(loss, list(model.parameters())))


def client_of(model, data, loss, sides, **more) -> FederatedClient:
    more.setdefault("options", LocalTrainingConfig(batch_size=WHOLE, epochs=2))
    return federation_client(model, data, loss, sides=sides, **more)


def federation(strategy, data=None) -> tuple[list[dict], list[dict]]:
    """Return the last states of two clients, and x before each of three rounds."""
    kept, received = stores(2), []

    def note(report, arrays):
        received.append({name: torch.from_numpy(arrays[name].numpy()) for name in arrays})
        return False

    data = data or exact_blobs(2)
    train(
        strategy,
        3,
        exact,
        data,
        WHOLE,
        2,
        stores=kept,
        optimizer=lambda: SGD(momentum=0.9),
        on_round=note,
    )
    return [store.load(strategy.state.experiment, 3) for store in kept.values()], received[:3]


@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_dittos_own_model_by_hand(coefficient):
    """Two steps a round from where it was; y_i has momentum, v_i has none."""
    states, received = federation(built(Ditto, coefficient=coefficient, local_lr=LR))
    for state, data in zip(states, exact_blobs(2), strict=True):
        own = exact()
        for x in received:
            for _ in range(2):
                moves = slopes(own, data)
                with torch.no_grad():
                    for (name, value), move in zip(own.named_parameters(), moves, strict=True):
                        value -= LR * (move + coefficient * (value - x[name]))
        assert state[OWN].keys() == dict(own.named_parameters()).keys()
        for name, value in own.named_parameters():
            torch.testing.assert_close(state[OWN][name], value.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "alpha_lr"), [(0.3, None), (0.6, 0.02), (1.0, 0.0), (0.0, 0.0)])
def test_apfls_own_model_and_its_share_by_hand(alpha, alpha_lr):
    states, received = federation(built(APFL, alpha=alpha, alpha_lr=alpha_lr, local_lr=LR))
    for state, data in zip(states, exact_blobs(2), strict=True):
        own, share = exact(), alpha
        for x in received:
            local = exact()
            local.load_state_dict(x)
            optimizer = torch.optim.SGD(local.parameters(), LR, momentum=0.9)
            for step in range(2):
                mixture = mixed(own, local, share)
                moves = slopes(mixture, data)
                along = sum(
                    float(((v - y).detach() * g).sum())
                    for v, y, g in zip(own.parameters(), local.parameters(), moves, strict=True)
                )
                with torch.no_grad():
                    for value, move in zip(own.parameters(), moves, strict=True):
                        value -= LR * share * move
                if step == 0:
                    share -= (LR if alpha_lr is None else alpha_lr) * along
                    share = min(1.0, max(0.0, share))
                optimizer.zero_grad()
                F.cross_entropy(local(data.inputs)[1], data.labels).backward()
                optimizer.step()
        assert float(state[ALPHA][ALPHA]) == pytest.approx(share, abs=1e-12)
        assert (share == alpha) == (alpha_lr == 0.0)
        for name, value in own.named_parameters():
            found = state[APFL_OWN][name]
            torch.testing.assert_close(found, value.detach(), rtol=1e-12, atol=1e-12)


def mixed(own: nn.Module, local: nn.Module, share: float) -> nn.Module:
    found = copy.deepcopy(own)
    with torch.no_grad():
        for m, v, y in zip(found.parameters(), own.parameters(), local.parameters(), strict=True):
            m.copy_(share * v + (1 - share) * y)
    return found


@pytest.mark.slow
def test_pfedmes_step_is_down_the_moreau_envelope():
    """Of f = (3 w - 6)^2 / 2: theta = (18 + lambda w) / (9 + lambda), F' = lambda (w - theta)."""
    data = TensorBatches(torch.full((1, 1), 3.0).double(), torch.full((1,), 6.0).double())
    side = client_side(PFedMe, coefficient=4.0, steps=200, lr=0.05)
    start = [torch.full((1, 1), 1.0).double().numpy()]
    client = client_of(Regression(1), data, half_squared_error, {"pfedme": side})
    arrays, _, _ = client.fit(start, {"round": 1, "lr": LR})
    w = 1.0
    for _ in range(2):
        theta = (18 + 4 * w) / 13
        w -= LR * 4 * (w - theta)
    assert float(arrays[0].item()) == pytest.approx(w, abs=1e-12)
    assert float(side.theta["head.weight"]) == pytest.approx(theta, abs=1e-12)
    assert client.state == {}


@pytest.mark.parametrize("mu", [0.0, 0.3])
def test_pfedme_by_hand(mu):
    """Theta goes on within a round from where it was; it starts as x. FedProx draws w to x."""
    side = client_side(PFedMe, coefficient=2.0, steps=3, lr=0.2)
    data, theta, w, x = exact_blobs(1)[0], exact(), exact(), exact()
    for _ in range(2):
        for _ in range(3):
            moves = slopes(theta, data)
            with torch.no_grad():
                for t, move, at in zip(theta.parameters(), moves, w.parameters(), strict=True):
                    t -= 0.2 * (move + 2.0 * (t - at))
        with torch.no_grad():
            for at, t, start in zip(
                w.parameters(), theta.parameters(), x.parameters(), strict=True
            ):
                at -= LR * (2.0 * (at - t) + mu * (at - start))
    sides = {"fedprox": client_side(FedProx, mu=mu), "pfedme": side}
    client = client_of(exact(), data, F.cross_entropy, sides, test_data=data)
    ask = {"round": 1, "lr": LR, "evaluate-trained": True}
    _, scores = client.train(client.get_parameters({}), ask)
    loss, accuracy = evaluate_model(theta, data, F.cross_entropy)
    assert scores["personal-test-loss"] == pytest.approx(loss, rel=1e-9)
    assert scores["personal-test-accuracy"] == accuracy
    for name, value in w.named_parameters():
        found = client.shared.model.get_parameter(name)
        torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-12)
    for name, value in theta.named_parameters():
        torch.testing.assert_close(side.theta[name], value.detach(), rtol=1e-12, atol=1e-12)


def test_fedrods_heads_by_hand():
    """Three classes, of which client 0 is given two: the third gets no gradient in its G."""
    states, received = federation(built(FedRoD, local_lr=LR), few_classes())
    for state, data in zip(states, few_classes(), strict=True):
        counts = torch.tensor(data.class_counts(), dtype=torch.float64)
        personal = nn.Linear(8, 3, dtype=torch.float64)
        for param in personal.parameters():
            nn.init.zeros_(param)
        for x in received:
            local = exact()
            local.load_state_dict(x)
            both = [
                torch.optim.SGD(local.parameters(), LR, momentum=0.9),
                torch.optim.SGD(personal.parameters(), LR),
            ]
            for _ in range(2):
                features, logits = local(data.inputs)
                added = logits.detach() + personal(features.detach())
                balanced = logits.exp() * counts  # its softmax, by hand
                chosen = balanced[torch.arange(len(data)), data.labels] / balanced.sum(1)
                for one in both:
                    one.zero_grad()
                (-chosen.log().mean() + F.cross_entropy(added, data.labels)).backward()
                for one in both:
                    one.step()
        for name, value in personal.named_parameters():
            found = state[HEAD][f"head.{name}"]
            torch.testing.assert_close(found, value.detach(), rtol=1e-10, atol=1e-10)
    with refused("FedRoD"):
        FedRoDClient().check(nn.ModuleDict({"head": nn.Identity()}), SGD(), [])


@pytest.mark.parametrize("held", [3, 2])
def test_fedrod_refuses_a_loss_that_a_logit_of_minus_infinity_breaks(held):
    """Cross-entropy reads a class only where its probability is above 0; smoothing reads all."""
    data = TensorBatches(exact_blobs(1)[0].inputs[:6], torch.arange(6) % held, 3)
    smooth = partial(F.cross_entropy, label_smoothing=0.1)
    for loss in (F.cross_entropy, smooth):
        client = client_of(exact(), data, loss, {"fedrod": FedRoDClient()})
        smooth_rows = loss is smooth and held == 2
        with refused() if smooth_rows else nullcontext():
            client.train(client.get_parameters({}), {"round": 1, "lr": LR})


def test_fedrod_scores_both_heads_together():
    data, ask = few_classes()[0], {"round": 1, "lr": LR, "evaluate-trained": True}
    client = client_of(exact(), data, F.cross_entropy, {"fedrod": FedRoDClient()}, test_data=data)
    _, scores = client.train(client.get_parameters({}), ask)
    with torch.no_grad():
        features, logits = client.shared.model(data.inputs)  # with G alone again
        weight, bias = (client.state[HEAD][f"head.{name}"] for name in ("weight", "bias"))
        loss = F.cross_entropy(logits + features @ weight.T + bias, data.labels)
        alone = F.cross_entropy(logits, data.labels)
    assert scores["personal-test-loss"] == pytest.approx(float(loss), rel=1e-9)
    assert float(loss) != pytest.approx(float(alone), rel=1e-3)


def few_classes() -> list[TensorBatches]:
    first, second = exact_blobs(2)
    kept = first.labels < 2
    return [TensorBatches(first.inputs[kept], first.labels[kept], 3), second]


def test_a_share_stays_within_0_and_1():
    """One step from v = 0, y = 1 on a target far beyond: the slope points out of [0, 1]."""
    for target, share in ((-100.0, 1.0), (100.0, 0.0)):
        data = TensorBatches(torch.ones(1, 1).double(), torch.tensor([target]).double())
        store = ContextStateStore(RecordDict())
        store.save("e", 1, {APFL_OWN: {"head.weight": torch.zeros(1, 1).double()}}, set())
        client = client_of(
            Regression(1), data, half_squared_error, {"apfl": client_side(APFL)}, store=store
        )
        ones = [torch.ones(1, 1).double().numpy()]
        client.train(ones, {"round": 2, "lr": LR, "experiment": "e", "state-round": 1})
        assert float(client.state[ALPHA][ALPHA]) == share


class Normed(Classifier):
    """Has statistics of its own, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.body, nn.BatchNorm1d(8))


@pytest.mark.parametrize(
    ("side", "own"),
    [
        (client_side(Ditto, coefficient=0.0), OWN),
        (client_side(APFL, alpha=1.0, alpha_lr=0.0), APFL_OWN),
    ],
)
def test_the_own_model_is_scored_and_the_trained_one_sent(side, own):
    """With a mixture of v_i alone, both score v_i, with its BatchNorm statistics."""
    train_data, held_out = blobs(2)
    ask = {"round": 1, "lr": LR, "evaluate-trained": True}

    def client(**sides) -> FederatedClient:
        options = LocalTrainingConfig(batch_size=8, epochs=3, drop_last=True)
        scored = {"held_out": held_out, "test_data": held_out, "options": options}
        return client_of(Normed(), train_data, F.cross_entropy, sides, **scored)

    plain, personal = client(), client(side=side)
    start = plain.get_parameters({})
    arrays, _, _ = plain.fit(start, ask)
    sent, _, scores = personal.fit(start, ask)
    for one, other in zip(arrays, sent, strict=True):
        assert (one == other).all()  # what it sends, to the bit
    model = Normed()
    model.load_state_dict(personal.state[own], strict=True)
    loss, accuracy = evaluate_model(model, held_out, F.cross_entropy)
    assert scores["personal-test-loss"] == pytest.approx(loss, rel=1e-6)
    assert scores["personal-accuracy"] == accuracy
    trained = personal.shared.model.state_dict()
    moved = personal.state[own]["body.3.running_mean"] - trained["body.3.running_mean"]
    assert moved.abs().max() > 1e-6


def test_x_is_x_for_a_side_that_first_reads_it_after_training():
    """And it is a copy, laid out as the model is: nobody writes to what was received."""
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    loaded = {name: value.contiguous().clone() for name, value in tensors_of(model).items()}
    loaded["weight"] = loaded["weight"].clone(memory_format=torch.contiguous_format)
    before = {name: value.clone() for name, value in loaded.items()}
    unread = None
    context = LocalContext(model, loaded, ["weight"], {}, {}, unread, unread, 1, 1, 0.1)
    with torch.no_grad():
        model.weight += 1.0
    assert_same(dict(context.received_state), before)
    assert context.anchor["weight"].stride() == model.weight.stride()
    context.start["weight"].zero_()
    assert_same(loaded, before)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ditto", "apfl", "fedrod", "dbe"])
def test_a_run_says_that_the_local_optimizer_does_not_move_them(strategy, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="flwr")
    words = [*TINY, f"strategy={strategy}", "rounds=1"]
    run_recipe(tmp_path / "plain", *words)
    assert "plain SGD" not in caplog.text
    run_recipe(tmp_path / "adam", *words, "local.optimizer=adam")
    assert f"strategy={strategy} moves the " in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["strategy=ditto", "local.weight_decay=0.01"],
        ["strategy=ditto", "local.clip=1"],
        ["strategy=[ditto,fedsam]"],
    ],
)
def test_a_run_says_that_they_do_without_decay_clipping_and_sam(words, tmp_path, caplog):
    caplog.set_level(logging.WARNING, logger="flwr")
    run_recipe(tmp_path / "run", *TINY, "rounds=1", *words)
    assert "strategy=ditto moves the " in caplog.text
