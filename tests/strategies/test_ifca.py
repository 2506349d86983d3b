"""IFCA on least squares, whose optimum of each group is known, and against its algorithm."""

import pytest
import torch
from torch.nn import functional as F

from fedhet.client_app.state import require_state
from fedhet.strategies.base import RefusedReplyError, Reply
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.fedavg import FedAvg
from fedhet.strategies.fedprox import FedProx
from fedhet.strategies.ifca import CHOICE, IFCA, OWN, IFCAServer
from tests.federation import Regression, TensorBatches, federate, half_squared_error
from tests.strategies.labelled import assert_same, train
from tests.strategies.sides import built, client_side
from tests.strategies.test_closed_forms import Listed, gradient, optimum, stores
from tests.strategies.test_personal import BODY, HEAD, WHOLE, exact, exact_blobs, plain_loop

TRUTH = torch.tensor([[2.0, -1.0], [-1.0, 4.0]]).double()
FIRST = {"head.weight": torch.tensor([[1.0, 0.0]]).double()}  # and its shuffled twin is [0, 1]


def groups() -> list[TensorBatches]:
    """Return two clients of each of two linear models, with noise, of different sizes."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for i, truth in enumerate(TRUTH.repeat(2, 1)):
        inputs = torch.randn(20 + 10 * i, 2, generator=generator, dtype=torch.double)
        noise = torch.randn(len(inputs), generator=generator, dtype=torch.double)
        found.append(TensorBatches(inputs, inputs @ truth + noise))
    return found


def mean(models, sizes, names):
    return {
        n: sum(size * one[n] for size, one in zip(sizes, models, strict=True)) / sum(sizes)
        for n in names
    }


def two_models(strategy, rounds: int):
    """Return both models after some rounds, one step on all examples each."""
    how = {"loss": half_squared_error, "rounds": rounds, "initial": FIRST}
    options = LocalTrainingConfig(batch_size=WHOLE)
    params, _ = federate(strategy, groups(), model=lambda: Regression(2), options=options, **how)
    other = strategy.server_sides["ifca"].models["1:head.weight"]
    return torch.cat([params["head.weight"], other])


@pytest.mark.slow
def test_each_group_comes_to_its_own_least_squares():
    """The mean by examples of one step each is a step on the whole group's squares."""
    data = groups()
    solutions = []
    for one, two in (data[::2], data[1::2]):
        inputs, labels = torch.cat([one.inputs, two.inputs]), torch.cat([one.labels, two.labels])
        solutions.append(torch.linalg.solve(inputs.T @ inputs, inputs.T @ labels))
    found = two_models(built(IFCA, local_lr=0.5), 80)
    torch.testing.assert_close(found, torch.stack(solutions), rtol=0, atol=1e-10)
    assert (solutions[0] - TRUTH[0]).norm() < 0.5 < (solutions[0] - optimum(data)).norm()


@pytest.mark.parametrize("averaging", ["models", "gradients"])
def test_four_rounds_by_hand(averaging):
    """Cohorts in which one model, or the other, is chosen by nobody; server.lr below 1.

    FedProx pulls to the chosen model, and so not at all in a round's first step.
    """
    cohorts, data = [[0, 1, 2, 3], [1, 3], [0, 2], [0, 1, 2]], groups()
    models = [torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 1.0]).double()]
    for cohort in cohorts:
        chosen: list[list[int]] = [[], []]
        for i in cohort:
            losses = [float((data[i].inputs @ w - data[i].labels).square().sum()) for w in models]
            chosen[losses.index(min(losses))].append(i)
        for j, members in enumerate(chosen):
            total = sum(len(data[i]) for i in (members if averaging == "models" else cohort))
            steps = [len(data[i]) * gradient(data[i], models[j]) for i in members]
            models[j] = models[j] - 0.7 * 0.1 * sum(steps, torch.zeros(2).double()) / max(total, 1)
    prox = {"fedprox": client_side(FedProx, mu=9.0)}
    how = {"server_lr": 0.7, "local_lr": 0.1, "sampler": Listed(*cohorts), "client_sides": prox}
    found = two_models(built(IFCA, averaging=averaging, **how), 4)
    torch.testing.assert_close(found, torch.stack(models), rtol=1e-10, atol=1e-12)


def test_layers_outside_are_fedavgs_and_own_models_are_kept():
    """Every client starts from the same body, whichever head it chooses; two steps a round."""
    data, start, model = exact_blobs(3), exact(), exact()
    server = IFCAServer(2, "head.*", "models", 1.0)
    server.init(dict(start.named_parameters()))
    sizes = [len(one) for one in data]
    heads = [
        {n: p.detach() for n, p in start.named_parameters() if n in HEAD},
        {n.partition(":")[2]: p.detach() for n, p in server.models.items()},
    ]
    body = {n: p.detach() for n, p in start.named_parameters() if n in BODY}
    for _ in range(3):
        trained, chosen = [], []
        for one in data:
            losses = []
            for head in heads:
                model.load_state_dict({**body, **head})
                losses.append(F.cross_entropy(model(one.inputs)[1], one.labels).item())
            chosen.append(losses.index(min(losses)))
            model.load_state_dict({**body, **heads[chosen[-1]]})
            trained.append(plain_loop(model, one, [(2, BODY + HEAD)]))
        body = mean(trained, sizes, BODY)
        for j in (0, 1):
            if members := [i for i, one in enumerate(chosen) if one == j]:
                heads[j] = mean([trained[i] for i in members], [sizes[i] for i in members], HEAD)
    kept = stores(3)
    strategy = built(IFCA, layers="head.*", local_lr=0.1)
    params, _ = train(strategy, 3, exact, data, WHOLE, 2, stores=kept)
    other = {n.partition(":")[2]: p for n, p in strategy.server_sides["ifca"].models.items()}
    torch.testing.assert_close(params, {**body, **heads[0]}, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(other, heads[1], rtol=1e-10, atol=1e-12)
    for store, model in zip(kept.values(), trained, strict=True):
        mine = store.load(strategy.state.experiment, 3)[OWN]
        torch.testing.assert_close(mine, {n: model[n] for n in HEAD}, rtol=1e-10, atol=1e-12)


def test_one_cluster_is_fedavg_to_the_bit():
    one, _ = train(built(IFCA, clusters=1))
    assert_same(one, train(built(FedAvg))[0])
    # its clients keep nothing, so there is nothing that they can lose
    assert require_state({"ifca": {}}) == {}


@pytest.mark.parametrize("choice", [[1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [2.0, -1.0]])
def test_a_choice_of_no_model_is_refused(choice):
    sent = {CHOICE: {CHOICE: torch.tensor(choice)}}
    with pytest.raises(RefusedReplyError):
        IFCAServer(2, "all", "models", 1.0).check(Reply(0, 1, 1, 0.1, {}, sent))
