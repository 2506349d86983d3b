"""The Gaussian mechanism: its epsilon against the exact one, its sensitivity, its noise."""

import math
import sys

import pytest
import torch
from torch import Tensor

from fedhet.strategies.base import LocalSummary
from fedhet.strategies.modes.private.gaussian_mechanism import GaussianMechanism, epsilon_of
from fedhet.strategies.statistics.class_means import COUNTS, SUMS, class_sums
from fedhet.strategies.statistics.soft_labels import SOFT_LABEL_SUMS, SoftLabelClient
from tests.federation import TensorBatches
from tests.refused import refused
from tests.strategies.labelled import Biasless, PassThrough, assert_same, blobs, context_of, upload
from tests.strategies.sides import total_of
from tests.strategies.statistics.test_soft_labels import COHORT, matrix, server

DELTA = 1e-5
SEEDED = {"reproducible_noise": True}


def mechanism_of(noise_multiplier=1.0, clip=1.0, *, reproducible_noise=False) -> GaussianMechanism:
    return GaussianMechanism(
        noise_multiplier=noise_multiplier,
        clip=clip,
        delta=DELTA,
        reproducible_noise=reproducible_noise,
    )


def exact_epsilon(noise_multiplier: float, uploads: int, delta: float = DELTA) -> float:
    """Return epsilon of composed Gaussian mechanisms, by bisection.

    Balle and Wang, ICML 2018, theorem 8, of sensitivity / noise mu = sqrt(T) / z:
    delta = Phi(mu / 2 - eps / mu) - e^eps Phi(-mu / 2 - eps / mu).
    """
    mu = math.sqrt(uploads) / noise_multiplier

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def excess(epsilon: float) -> float:
        lost = math.exp(epsilon) * normal(-mu / 2 - epsilon / mu)
        return normal(mu / 2 - epsilon / mu) - lost - delta

    low, high = 0.0, 700.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


@pytest.mark.slow
@pytest.mark.parametrize(("noise_multiplier", "uploads"), [(1.0, 1), (4.0, 50), (1.0, 500)])
def test_epsilon_is_never_below_the_exact_one_and_hardly_above(noise_multiplier, uploads):
    exact = exact_epsilon(noise_multiplier, uploads)
    found = mechanism_of(noise_multiplier).epsilon(uploads)
    # from 55, which is beyond any use, the loose accountant answers
    assert exact <= found <= (exact + 0.05 if exact < 55 else 1.1 * exact)
    assert mechanism_of(noise_multiplier).epsilon(0) == 0.0


def test_a_missing_accountant_is_said_before_round_1(monkeypatch):
    epsilon_of.cache_clear()
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with refused("[privacy]", "strategy.soft_labels.noise_multiplier=0"):
        server(noise_multiplier=1.0)
    server()


def sums_and_counts(mechanism: GaussianMechanism, vectors: Tensor, labels: Tensor) -> Tensor:
    data = TensorBatches(vectors, labels, num_classes=vectors.shape[1])
    context = context_of(PassThrough(), data)
    found = class_sums(context, lambda features, logits: mechanism.clipped(logits))
    return torch.cat([found[SUMS].flatten(), found[COUNTS]])


@pytest.mark.parametrize("clip", [0.3, 1.0, 2.5])
def test_one_example_moves_an_upload_by_no_more_than_delta(clip):
    """Delta is the noise' standard deviation over z; an example that is clipped attains it."""
    mechanism = mechanism_of(noise_multiplier=2.0, clip=clip)
    delta = mechanism.noise / 2.0
    generator = torch.Generator().manual_seed(0)
    moves = []
    for _ in range(60):
        size = int(torch.randint(2, 9, (), generator=generator))
        vectors = 2 * torch.randn(size, 4, generator=generator)
        labels = torch.randint(0, 4, (size,), generator=generator)
        whole = sums_and_counts(mechanism, vectors, labels)
        moves.append((whole - sums_and_counts(mechanism, vectors[1:], labels[1:])).norm().item())
    assert max(moves) <= delta + 1e-5
    assert max(moves) == pytest.approx(delta, rel=1e-4)
    assert delta == pytest.approx(math.sqrt(clip**2 + 1))
    rows = clip * torch.tensor([[0.6, 0.8], [1.2, 1.6], [0.2, 0.4]])  # only the second is too long
    expected = clip * torch.tensor([[0.6, 0.8], [0.6, 0.8], [0.2, 0.4]])
    torch.testing.assert_close(mechanism.clipped(rows), expected)


@pytest.mark.parametrize(("z", "clip", "reproducible"), [(2.0, 1.0, True), (0.5, 0.2, False)])
def test_the_noise_has_the_standard_deviation_that_it_claims(z, clip, reproducible):
    """z sqrt(S^2 + 1); of 40,000 numbers the estimate is off by .35 % (one standard deviation)."""
    mechanism = mechanism_of(z, clip=clip, reproducible_noise=reproducible)
    values = torch.full((200, 200), 5.0)
    generators = (torch.Generator().manual_seed(0) for _ in range(2))
    drawn, again = (mechanism.noised(values, generator) - values for generator in generators)
    assert torch.equal(drawn, again) == reproducible
    expected = z * math.sqrt(clip**2 + 1)
    assert drawn.std().item() == pytest.approx(expected, rel=0.025)
    assert abs(drawn.mean().item()) < 7 * expected / 200


def test_sums_and_counts_get_noise_of_their_own_and_none_is_drawn_without():
    data = blobs(1)[0]
    summary, sent = LocalSummary(len(data), 1, 0.1), []
    for mechanism in (mechanism_of(0.0), mechanism_of(0.0, clip=0.01), mechanism_of(1.0, **SEEDED)):
        context = context_of(Biasless(), data)
        before = context.generator.get_state()
        sent.append(SoftLabelClient(mechanism).end(context, summary)[SOFT_LABEL_SUMS])
        drawn = not torch.equal(context.generator.get_state(), before)
        assert drawn == mechanism.active
    plain, same, noised = sent
    assert_same(plain, same)
    noise = torch.cat([(noised[name] - plain[name]).flatten() for name in (SUMS, COUNTS)])
    assert noise.abs().min() > 0
    assert len(noise.unique()) == len(noise) == 12


@pytest.mark.slow
@pytest.mark.parametrize("clip", [0.01, 1.0])
def test_rows_stay_probabilities_under_noise(clip):
    side, emptied = server(noise_multiplier=0.05, clip=clip, **SEEDED), 0
    mechanism, generator = side.how, torch.Generator().manual_seed(0)
    for _ in range(300):
        sums = mechanism.noised(10 * mechanism.clipped(torch.full((2, 2), 0.5)), generator)
        emptied += int((sums <= 0).all(dim=1).sum())
        side.reduce(total_of([upload(0, sums.tolist(), [10.0, 10.0])]), {}, COHORT)
        rows = matrix(side)
        assert rows.min() >= 0
        torch.testing.assert_close(rows.sum(1), torch.ones(2))
    assert (emptied > 0) == (clip == 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("history", ["round", "all"])
def test_a_class_that_nobody_holds_keeps_its_row_under_noise(history):
    side = server(noise_multiplier=1.0, history=history, **SEEDED)
    mechanism, generator = side.how, torch.Generator().manual_seed(0)
    for _ in range(40):
        replies = []
        for client in range(16):
            sums = mechanism.noised(torch.tensor([[80.0, 20.0], [0.0, 0.0]]), generator)
            counts = mechanism.noised(torch.tensor([100.0, 0.0]), generator)
            replies.append(upload(client, sums.tolist(), counts.tolist()))
        side.reduce(total_of(replies), {}, COHORT)
        rows = matrix(side)
        assert rows[1].tolist() == [0.0, 1.0]
        assert rows[0, 0].item() == pytest.approx(0.8, abs=0.02)
