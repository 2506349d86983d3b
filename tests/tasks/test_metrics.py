"""Metrics of small random predictions against scikit-learn and closed forms."""

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from scipy.stats import pearsonr, spearmanr

from fedhet.common.metrics import CLIENT, PERSONAL_TEST, RECEIVED, MetricName, in_range, metrics_of
from fedhet.tasks.metrics import MetricSet, Predictions
from tests.refused import refused

pytestmark = pytest.mark.xdist_group("torchmetrics")  # takes seconds to import
CLASSES = ("a", "b", "c", "d", "e", "f", "g")
C = len(CLASSES)


def batches(logits, labels, size=30):
    return zip(logits.split(size), labels.split(size), strict=True)


def measured(names, predictions, outputs, labels, **how):
    collected = MetricSet(names, predictions, **how)
    for batch in batches(outputs, labels):
        collected.update(*batch)
    return collected.compute()


def classified(held=range(C), size=100):
    """Return logits, labels of the classes ``held``, and both for scikit-learn."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(size, C, generator=generator)
    labels = torch.tensor(list(held))[torch.randint(len(held), (size,), generator=generator)]
    logits[torch.arange(size), labels] += 1.0
    shares = logits.double().softmax(1).numpy()
    return logits, labels, labels.numpy(), shares.argmax(1), shares


def macro(values):
    return float(np.mean(list(values)))


def one_against_rest(score, true, shares):
    """By class that has examples of both kinds."""
    return {
        c: score(true == c, shares[:, c]) for c in range(C) if 0 < (true == c).sum() < len(true)
    }


def expected_calibration_error(true, shares, bins=15):
    sure, right = shares.max(1), shares.argmax(1) == true
    place = np.minimum((sure * bins).astype(int), bins - 1)
    return sum(
        abs(sure[place == b].mean() - right[place == b].mean()) * (place == b).mean()
        for b in set(place)
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:sklearn")  # classes without a label
@pytest.mark.parametrize("held", [range(C), (0, 3, 4)], ids=["all classes", "three classes"])
def test_a_classification_against_scikit_learn(held):
    logits, labels, true, guess, shares = classified(held)
    found = measured(
        metrics_of("classification"), Predictions("classification", CLASSES), logits, labels
    )
    fscore = {"zero_division": 0.0}
    union = sorted({*true, *guess})
    negatives = [np.mean(guess[true != c] != c) for c in union]
    expected = {
        "accuracy": sk.accuracy_score(true, guess),
        "balanced_accuracy": sk.balanced_accuracy_score(true, guess),
        "top5_accuracy": sk.top_k_accuracy_score(true, shares, k=5, labels=range(C)),
        "precision": sk.precision_score(true, guess, average="macro", **fscore),
        "recall": sk.recall_score(true, guess, average="macro", **fscore),
        "specificity": macro(negatives),
        "f1": sk.f1_score(true, guess, average="macro", **fscore),
        "f1_weighted": sk.f1_score(true, guess, average="weighted", **fscore),
        "iou": sk.jaccard_score(true, guess, average="macro", **fscore),
        "auroc": macro(one_against_rest(sk.roc_auc_score, true, shares).values()),
        "average_precision": macro(
            one_against_rest(sk.average_precision_score, true, shares).values()
        ),
        "cohen_kappa": sk.cohen_kappa_score(true, guess),
        "mcc": sk.matthews_corrcoef(true, guess),
        "calibration_error": expected_calibration_error(true, shares),
    }
    assert found.keys() == expected.keys() == set(metrics_of("classification"))
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=2e-6), name
        assert in_range(name, found[name])


@pytest.mark.slow
def test_each_class_against_scikit_learn():
    logits, labels, true, guess, shares = classified((0, 3, 4))
    names = ["f1", "accuracy", "auroc"]
    found = measured(names, Predictions("classification", CLASSES), logits, labels, per_class=True)
    f1 = sk.f1_score(true, guess, average=None, labels=range(C), zero_division=0.0)
    for c in {*true, *guess}:
        assert found[f"f1/{CLASSES[c]}"] == pytest.approx(f1[c], abs=1e-6)
    for c, value in one_against_rest(sk.roc_auc_score, true, shares).items():
        assert found[f"auroc/{CLASSES[c]}"] == pytest.approx(value, abs=1e-6)
        assert found[f"accuracy/{CLASSES[c]}"] == pytest.approx(np.mean(guess[true == c] == c))
    assert {name for name in found if name.startswith("auroc/")} == {
        "auroc/a",
        "auroc/d",
        "auroc/e",
    }


def test_what_one_class_alone_does_not_define_is_left_out():
    logits, labels = torch.eye(3), torch.zeros(3, dtype=torch.long)
    found = measured(
        ["auroc", "accuracy"], Predictions("classification", ("a", "b", "c")), logits, labels
    )
    assert found == {"accuracy": pytest.approx(1 / 3)}


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_regression_against_scikit_learn(outputs):
    generator = torch.Generator().manual_seed(2)
    shape = (80,) if outputs == 1 else (80, outputs)
    labels = 5 + torch.randn(shape, generator=generator)
    values = labels + 0.7 * torch.randn(shape, generator=generator)
    given = values.reshape(80, -1)  # a model gives (B, 1)
    found = measured(
        metrics_of("regression"), Predictions("regression", num_outputs=outputs), given, labels
    )
    true, guess = labels.double().numpy(), values.double().numpy()
    columns = list(zip(true.reshape(80, -1).T, guess.reshape(80, -1).T, strict=True))
    expected = {
        "mae": sk.mean_absolute_error(true, guess),
        "mse": sk.mean_squared_error(true, guess),
        "rmse": np.sqrt(sk.mean_squared_error(true, guess)),
        "mape": sk.mean_absolute_percentage_error(true, guess),
        "smape": np.mean(2 * abs(guess - true) / (abs(guess) + abs(true))),
        "r2": sk.r2_score(true, guess),
        "explained_variance": sk.explained_variance_score(true, guess),
        "pearson": macro(pearsonr(*pair).statistic for pair in columns),
        "spearman": macro(spearmanr(*pair).statistic for pair in columns),
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-4), name
        assert in_range(name, found[name])


@pytest.mark.slow
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(
    ("mean", "std", "rows"),
    [(2000, 1, 80), (1e4, 1, 20000), (1e6, 10, 500), (0, 1e-3, 80), (0, 1e-4, 80), (5, 1e-3, 80)],
)
def test_the_fit_of_targets_far_from_zero_or_of_a_small_unit_is_scikit_learns(
    mean, std, rows, outputs
):
    generator = torch.Generator().manual_seed(4)
    shape = (rows, outputs) if outputs > 1 else (rows,)
    labels = mean + std * torch.randn(shape, generator=generator)
    noisy = labels + 0.5 * std * torch.randn(shape, generator=generator)
    for values in (noisy, torch.zeros(shape)):  # of a good model, and an untrained one
        found = measured(
            ["r2", "explained_variance"],
            Predictions("regression", num_outputs=outputs),
            values.reshape(rows, -1),
            labels,
        )
        true, guess = labels.double().numpy(), values.double().numpy()
        expected = {
            "r2": sk.r2_score(true, guess),
            "explained_variance": sk.explained_variance_score(true, guess),
        }
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert all(in_range(name, value) for name, value in found.items())


def test_what_constant_targets_or_predictions_do_not_define_is_left_out():
    names = ["mae", "r2", "explained_variance", "pearson", "spearman"]
    same, other = torch.full((40,), 0.1), torch.arange(40.0)
    kind = Predictions("regression")
    assert measured(names, kind, other, same).keys() == {"mae"}
    assert measured(names, kind, same, other).keys() == {"mae", "r2", "explained_variance"}


def test_a_segmentation_counts_pixels_without_the_ignored_ones():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 3, 5, 6, generator=generator)
    labels = torch.randint(3, (4, 5, 6), generator=generator)
    labels[0, 0] = 255
    kind = Predictions("segmentation", ("sky", "road", "car"), ignore_index=255)
    found = measured(metrics_of("segmentation"), kind, logits, labels, per_class=True)
    counted = labels.flatten() != 255
    true = labels.flatten()[counted].numpy()
    guess = logits.argmax(1).flatten()[counted].numpy()
    by_class = sk.jaccard_score(true, guess, average=None)
    expected = {
        "accuracy": sk.accuracy_score(true, guess),
        "balanced_accuracy": sk.balanced_accuracy_score(true, guess),
        "iou": by_class.mean(),
        "iou/road": by_class[1],
        "dice": sk.f1_score(true, guess, average="macro"),
        "f1": sk.f1_score(true, guess, average="macro"),
        "mcc": sk.matthews_corrcoef(true, guess),
        "cohen_kappa": sk.cohen_kappa_score(true, guess),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name


def test_the_first_batch_does_not_decide_what_is_counted_together():
    """Where all is right, the first and the first five are equal; so are the errors of a fit."""
    logits, labels, *_ = classified()
    right = torch.eye(C)[:3], torch.arange(3)
    collected = MetricSet(["top5_accuracy"], Predictions("classification", CLASSES))
    collected.update(*right)
    collected.reset()
    collected.update(logits, labels)
    among = (logits.topk(5, 1).indices == labels[:, None]).any(1).double().mean()
    assert collected.compute()["top5_accuracy"] == pytest.approx(float(among))
    fit = MetricSet(["mape", "smape"], Predictions("regression", ()))
    fit.update(torch.ones(3, 1), torch.ones(3))
    fit.reset()
    fit.update(torch.full((3, 1), 2.0), torch.ones(3))
    assert fit.compute() == pytest.approx({"mape": 1.0, "smape": 2 / 3})


@pytest.mark.parametrize(
    ("name", "kind", "classes", "reason"),
    [
        ("mae", "classification", 10, "f1"),
        ("f1", "regression", 0, "regression mae"),
        ("auroc", "segmentation", 3, "segmentation dice"),
        ("top5_accuracy", "classification", 5, "1 5"),
    ],
)
def test_an_unfit_metric_is_refused(name, kind, classes, reason):
    with refused(*reason.split()):
        MetricSet([name], Predictions(kind, tuple(map(str, range(classes)))))


@pytest.mark.parametrize("name", ["auroc", "average_precision", "calibration_error"])
def test_logits_between_0_and_1_are_logits_whatever_their_batch(name):
    # One batch of two lies in [0, 1]; the same probabilities come from logits that do not.
    logits = torch.tensor([[0.1, 0.9], [0.4, 0.6], [0.9, 0.2], [3.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    labels = torch.tensor([1, 0, 0, 0, 1, 1])
    predictions = Predictions("classification", ("a", "b"))

    def value(shift, size):
        found = MetricSet([name], predictions)
        for batch in batches(logits + shift, labels, size):
            found.update(*batch)
        return found.compute()[name]

    shares = logits.double().softmax(1).numpy()
    expected = {
        "auroc": sk.roc_auc_score(labels, shares[:, 1]),
        "average_precision": np.mean(
            [sk.average_precision_score(labels == c, shares[:, c]) for c in (0, 1)]
        ),
        "calibration_error": expected_calibration_error(labels.numpy(), shares),
    }
    for shift in (0.0, 5.0):
        for size in (1, 3, 6):
            assert value(shift, size) == pytest.approx(expected[name], abs=1e-6)


def test_a_regression_with_other_outputs_than_targets_has_no_metrics():
    found = MetricSet(["mae"], Predictions("regression"))
    with refused("4", "2"):
        found.update(torch.zeros(4, 2), torch.zeros(4))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("f1", MetricName("f1")),
        ("client_f1/St. John's-wort", MetricName("f1", CLIENT, "St. John's-wort")),
        ("received-train-loss", MetricName("train_loss", RECEIVED)),
        ("personal_test_loss", MetricName("loss", PERSONAL_TEST)),
        ("f1/", MetricName("f1", class_name="")),
    ],
)
def test_a_name_is_read_and_written(text, name):
    assert MetricName.read(text) == name
    base, slash, of_class = text.partition("/")
    assert str(name) == base.replace("-", "_") + slash + of_class
