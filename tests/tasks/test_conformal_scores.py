"""Scores by hand, the quantile, its promise on synthetic scores, and MAPIE's APS."""

import math

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from fedhet.tasks.conformal.scores import (
    APS,
    Score,
    coverage_and_size,
    coverage_band,
    fit_temperature,
    log_loss,
    of_labels,
    probabilities_of,
    quantile,
)
from fedhet.tools.conformal.measure import Options, Outputs, on_test_set

PROBABILITIES = np.array([[0.2, 0.5, 0.3]])  # in order: class 1, 2, 0


def test_scores_by_hand():
    scores = APS(PROBABILITIES, np.array([0.5]))
    assert scores[0] == pytest.approx([0.8 + 0.1, 0.25, 0.5 + 0.15])
    assert APS(PROBABILITIES, np.array([0.0]))[0] == pytest.approx([0.8, 0.0, 0.5])
    # RAPS adds the penalty for each place beyond the free ones
    score = Score("RAPS", penalty=0.1, free=1)
    assert score(PROBABILITIES, np.array([0.5]))[0] == pytest.approx([1.1, 0.25, 0.75])
    assert score.largest(3) == pytest.approx(1.2)
    rounded = np.array([[0.8703613032229043, 0.10955897312868665, 0.020079723648409178]])
    assert np.cumsum(rounded)[1] + rounded[0, 2] > 1.0
    assert APS(rounded, np.array([1.0])).max() == 1.0 == APS.largest(3)


def test_the_quantile_is_the_right_score_and_infinite_where_there_are_too_few():
    scores = np.array([0.3, 0.1, 0.9, 0.7, 0.5, 0.2, 0.6, 0.4, 0.8])  # 9: (n + 1) .9 = 9
    assert quantile(scores, 0.1) == 0.9
    assert quantile(scores, 1.0) == -math.inf  # nothing has to be covered
    assert quantile(scores, 0.2) == 0.8
    assert quantile(scores[:8], 0.1) == math.inf
    # sets hold the classes whose score is at most the threshold
    scores = np.array([[0.1, 0.5, 0.9], [0.6, 0.7, 0.2]])
    assert coverage_and_size(scores, np.array([1, 0]), 0.5) == (0.5, 1.5)
    assert coverage_and_size(scores, np.array([1, 0]), math.inf) == (1.0, 3.0)
    assert coverage_and_size(scores, np.array([1, 0]), 0.0) == (0.0, 0.0)


@pytest.mark.parametrize(("count", "alpha"), [(19, 0.1), (50, 0.1), (99, 0.25)])
def test_the_coverage_is_what_theory_says_whatever_the_scores(count, alpha):
    """Over calibration sets it is Beta(k, n + 1 - k), of mean k / (n + 1)."""
    random = np.random.default_rng(0)
    draws = random.exponential(size=(4000, count))
    covered = np.array([1 - math.exp(-quantile(row, alpha)) for row in draws])  # P(score <= q)
    rank = math.ceil((count + 1) * (1 - alpha) - 1e-9)
    mean = rank / (count + 1)
    variance = mean * (1 - mean) / (count + 2)
    assert covered.mean() == pytest.approx(mean, abs=4 * math.sqrt(variance / 4000))
    assert covered.var() == pytest.approx(variance, rel=0.15)


def synthetic(count: int) -> Outputs:
    """Labels are drawn from the softmax of the logits: the model is right about its doubts."""
    random = np.random.default_rng(1)
    logits = 2.0 * random.normal(size=(count, 5))
    cumulated = probabilities_of(logits, 1.0).cumsum(axis=1)
    labels = (random.random((count, 1)) > cumulated).sum(axis=1).clip(max=4)
    return Outputs(logits, labels.astype(np.int64))


@pytest.mark.slow
@pytest.mark.parametrize("score", ["APS", "RAPS"])
def test_every_split_lies_in_the_binomial_band_but_for_a_few(score):
    outputs, levels = synthetic(2000), [0.1, 0.3]
    found = on_test_set(outputs, levels, Options(splits=40))[score]
    other = on_test_set(outputs, levels, Options(1, seed=1))[score]
    assert other.coverage != found.coverage[:1]
    assert (found.calibration, found.evaluation) == (800, 1000)
    for place, level in enumerate(levels):
        coverage = np.array(found.coverage)[:, place]
        low, high = coverage_band(found.calibration, found.evaluation, level)
        assert low < 1 - level < high
        assert ((coverage >= low) & (coverage <= high)).mean() >= 0.85  # 95 % of each split
        assert coverage.mean() == pytest.approx(1 - level, abs=0.012)
        # Were the threshold that of the counted examples themselves, it would hardly vary.
        spread = math.sqrt(level * (1 - level) * (1 / 800 + 1 / 1000))
        assert coverage.std() == pytest.approx(spread, rel=0.4)
    assert found.at(0.3)[1][0] < found.at(0.1)[1][0]


def test_the_band_is_the_quantiles_of_the_beta_binomial():
    """n = 9, a = .1: k = 9, and of one example the coverage is 0 or 1, 1 with 9 / 10."""
    assert coverage_band(9, 1, 0.1, level=0.7) == (1.0, 1.0)
    assert coverage_band(9, 1, 0.1, level=0.9) == (0.0, 1.0)
    assert coverage_band(8, 100, 0.1) == (1.0, 1.0)
    low, high = coverage_band(10_000, 10_000, 0.1)  # nearly normal, of variance 2 a (1 - a) / n
    assert high - low == pytest.approx(2 * 1.96 * math.sqrt(2 * 0.09 / 10_000), rel=0.03)


def test_the_temperature_undoes_what_was_done_to_the_logits():
    outputs = synthetic(4000)
    plain = fit_temperature(outputs.logits, outputs.labels)
    assert plain == pytest.approx(1.0, abs=0.1)
    assert fit_temperature(3 * outputs.logits, outputs.labels) == pytest.approx(3 * plain, rel=1e-3)
    around = [log_loss(outputs.logits, outputs.labels, plain * factor) for factor in (0.97, 1.03)]
    assert log_loss(outputs.logits, outputs.labels, plain) < min(around)


def test_mapies_aps_has_the_same_scores_quantile_and_sets():
    """An independent implementation: scores with its u, and sets with the last label kept."""
    mapie = pytest.importorskip("mapie.classification")
    outputs = synthetic(600)
    model = LogisticRegression().fit(outputs.logits, outputs.labels)
    theirs = mapie.SplitConformalClassifier(
        model, confidence_level=0.85, conformity_score="aps", prefit=True, random_state=3
    )
    theirs.conformalize(outputs.logits[:300], outputs.labels[:300])
    keep_last = {"include_last_label": True}
    _, sets = theirs.predict_set(outputs.logits[300:], conformity_score_params=keep_last)
    probabilities = model.predict_proba(outputs.logits)
    uniform = np.random.RandomState(3).uniform(size=300)  # theirs takes u p off the whole
    own = of_labels(APS(probabilities[:300], 1 - uniform), outputs.labels[:300])
    threshold = quantile(own, 0.15)
    before = APS(probabilities[300:], np.zeros(300))  # the sum before each label
    assert np.array_equal(before < threshold, sets[:, :, 0])
