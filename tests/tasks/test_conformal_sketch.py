"""Clients' histograms: never below the pooled quantile, at most one width above it."""

import math

import numpy as np
import pytest

from fedhet.tasks.conformal.scores import APS, log_loss, of_labels, probabilities_of, quantile
from fedhet.tasks.conformal.sketch import (
    TEMPERATURES,
    Grid,
    HeldOutClient,
    bytes_down,
    bytes_up,
    shared_quantile,
    shared_temperature,
)
from fedhet.tools.conformal.measure import Options, Outputs, at_clients
from tests.tasks.test_conformal_scores import synthetic


def test_scores_are_rounded_up_by_hand():
    grid = Grid(1.0, bins=4)
    counts = grid.counts(np.array([0.0, 0.25, 0.2500001, 0.9, 1.0, 1.1]))
    assert counts.tolist() == [2, 1, 0, 2, 1]
    assert grid.quantile(counts, 0.5) == 1.0  # the 4th of 6: ceil(7 / 2)
    assert grid.quantile(counts, 0.7) == 0.5  # the 3rd
    assert grid.quantile(counts, 0.2) == math.inf  # the 6th, above the last edge
    assert grid.quantile(counts, 0.01) == math.inf  # too few
    fine = Grid(1.1, 1000)  # a score on an edge stays there
    assert fine.quantile(fine.counts(np.repeat(fine.edges[299], 50)), 0.1) == fine.edges[299]


@pytest.mark.parametrize("bins", [3, 1000])
@pytest.mark.parametrize("alpha", [0.05, 0.37, 0.9])
def test_the_shared_quantile_lies_within_a_width_above_the_pooled_one(bins, alpha):
    random = np.random.default_rng(0)
    clients = [random.beta(1 + k, 2, size=20 + 7 * k) for k in range(5)]  # not alike
    grid = Grid(1.0, bins)
    exact = quantile(np.concatenate(clients), alpha)
    shared = shared_quantile([grid.counts(scores) for scores in clients], grid, alpha)
    assert exact <= shared <= exact + grid.width


def client_of(outputs: Outputs) -> HeldOutClient:
    fitting = np.arange(len(outputs.labels)) % 2 == 0
    return HeldOutClient(outputs.logits, outputs.labels, fitting, np.full(len(outputs.labels), 0.5))


def test_a_client_sends_a_histogram_of_the_examples_that_calibrate_and_none_sends_zeros():
    outputs, grid = synthetic(41), Grid(1.0, 100)
    client = client_of(outputs)
    sent = client.histograms(2.0, 100)["APS"]
    scores = APS(probabilities_of(outputs.logits, 2.0), np.full(41, 0.5))
    own = of_labels(scores, outputs.labels)[1::2]
    assert sent.tolist() == grid.counts(own).tolist()
    assert sent.nbytes + client.log_losses().nbytes == bytes_up(grid) == 4 * 101 + 8 * 121
    assert bytes_down() == 16
    nobody = client_of(Outputs(np.zeros((0, 5)), np.zeros(0, dtype=np.int64)))
    assert not nobody.histograms(1.0, 1000)["APS"].any()
    assert shared_temperature([nobody.log_losses()] * 2) == 1.0


def test_the_shared_temperature_is_the_grids_best_for_all_examples():
    outputs = synthetic(300)
    parts = [Outputs(2.0 * outputs.logits[n::3], outputs.labels[n::3]) for n in range(3)]
    shared = shared_temperature([client_of(part).log_losses() for part in parts])
    logits, labels = (
        np.concatenate([getattr(part, name)[::2] for part in parts])
        for name in ("logits", "labels")
    )
    losses = [log_loss(logits, labels, float(temperature)) for temperature in TEMPERATURES]
    assert shared == TEMPERATURES[int(np.argmin(losses))]
    assert 1.5 < shared < 2.7


@pytest.mark.slow
@pytest.mark.parametrize("score", ["APS", "RAPS"])
def test_the_clients_sets_cover_as_promised(score):
    outputs = synthetic(3000)
    parts = [Outputs(outputs.logits[n:1000:4], outputs.labels[n:1000:4]) for n in range(4)]
    test = Outputs(outputs.logits[1000:], outputs.labels[1000:])
    found = at_clients(parts, test, [0.1, 0.3], Options(splits=5, bins=200))
    shared, pooled = (by_score[score] for by_score in found)
    assert shared.calibration == pooled.calibration == 800
    for level in (0.1, 0.3):
        for by_histogram, by_scores in zip(shared.at(level)[0], pooled.at(level)[0], strict=True):
            assert by_scores <= by_histogram <= by_scores + 0.02
            assert by_histogram == pytest.approx(1 - level, abs=0.05)
