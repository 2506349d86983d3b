"""Figures, means and spreads, worked out by hand."""

import pytest

from fedhet.report.layout import automatic_layout
from fedhet.report.statistics import Figure, estimate, measured_metrics, sensible_targets
from fedhet.report.tables import metrics_tables


@pytest.fixture
def runs(finished_run):
    """Three seeds: final 0.5, 0.6, 0.7; best 0.6, 0.6, 0.7; to 0.6 in rounds 2, 3, 1."""
    curves = [(0.1, 0.3, 0.6, 0.5), (0.1, 0.2, 0.3, 0.6), (0.1, 0.65, 0.6, 0.7)]
    return [finished_run(seed=seed, accuracies=curve) for seed, curve in enumerate(curves)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("figure", "digits", "text"),
    [  # mean of .5, .6, .7 is .6; deviations -.1, 0, .1: sqrt(.02 / 2) = .1
        (Figure("accuracy"), 2, "0.60 ± 0.10"),
        (Figure("accuracy", percent=True), 2, "60.00 ± 10.00"),
        (Figure("best_accuracy"), 3, "0.633 ± 0.058"),  # .6, .6, .7: sqrt(.02 / 3 / 2)
        (Figure("rounds_to", 0.6), 1, "2.0 ± 1.0"),  # 2, 3, 1
        (Figure("bytes_to", 0.6), 1, "6.0 ± 3.0"),  # of 3 MB each
        (Figure("rounds_to", 0.65), 1, "> 3 (1 of 3 reached)"),
        (Figure("bytes_to", 0.65), 1, "> 9 (1 of 3 reached)"),
        (Figure("rounds_to", 0.6, last_round=2), 1, "> 2 (2 of 3 reached)"),
    ],
)
def test_figures_of_three_seeds(runs, figure, digits, text):
    assert estimate(figure, runs).text(digits) == text


def test_the_mean_of_the_last_five_and_figures_of_one_seed(runs, finished_run):
    late = Figure("late_accuracy")
    one = estimate(late, runs[:1])
    assert one.mean == pytest.approx((0.3 + 0.6 + 0.5) / 3)  # three of five; not the untrained one
    assert one.text(3) == "0.467"
    many = finished_run(accuracies=(0.0, 0.9, 0.1, 0.2, 0.3, 0.4, 0.5))
    assert estimate(late, [many]).mean == pytest.approx(0.3)
    two = Figure("late_accuracy", percent=True, evaluations=2)
    assert estimate(two, [many]).mean == pytest.approx(45)  # of .4 and .5
    assert two.title == "mean accuracy of the last 2 evaluations (%)"
    assert estimate(Figure("rounds_to", 0.6), runs[:1]).text(1) == "2"


def test_metrics_are_best_where_they_are_largest_or_for_errors_smallest(finished_run):
    run = finished_run(columns={"f1": 0.5, "client_mae": 2.0, "received_f1": 0.1, "f1/cat": 0.3})
    assert measured_metrics([run]) == ["f1", "client_mae", "f1/cat"]
    run.columns["f1"][1:], run.columns["client_mae"][1:] = [0.7, 0.2, 0.4], [3.0, 1.0, 2.0]
    found = {name: Figure(name).of(run).number for name in ("f1", "best_f1", "best_client_mae")}
    assert found == {"f1": 0.4, "best_f1": 0.7, "best_client_mae": 1.0}
    assert Figure("best_client_mae").title == "best client MAE"


def test_a_metric_of_the_users_own_has_a_last_value_and_no_best_one(finished_run):
    columns = {"sure": 0.5, "client_sure": 0.4, "norm_ratio": 0.1}
    run = finished_run(columns=columns, evaluation__metrics=["mine.metrics:sure"])
    assert measured_metrics([run]) == ["sure", "client_sure"]
    table = metrics_tables(automatic_layout([run]), measured_metrics([run]), None)[0]
    assert table.head == ["method", "n", "sure", "client sure"]
    assert [entry.text for entry in table.rows[0]] == ["FedAvg", "1", "0.5000", "0.4000"]


def test_a_run_whose_last_model_has_no_value_of_a_metric_does_not_count(finished_run):
    """As the R2 of a constant; the other runs' number is of them alone, and says so."""
    values = {"r2": 0.5, "client_r2": 0.25, "client_loss": 1.0}
    run, other = (finished_run(seed=seed, columns=values) for seed in (0, 1))
    for name in ("r2", "client_r2"):
        run.columns[name][-1] = None
        assert Figure(name).of(run) is None
        assert Figure(name, last_round=2).of(run).number == values[name]
        assert Figure(f"best_{name}").of(run).number == values[name]
    assert estimate(Figure("r2"), [run, other]).count == 1
    [table, *_] = metrics_tables(automatic_layout([run, other]), ["r2"], None)
    [row] = table.rows
    assert [cell.text for cell in row] == ["FedAvg", "2", "0.5000 (n = 1)", "0.5000 ± 0.0000"]


def test_metrics_of_evaluations_that_are_not_of_every_round_keep_their_last_value(finished_run):
    run = finished_run(columns={"r2": 0.5, "client_r2": 0.25, "client_loss": 1.0})
    for name in ("client_r2", "client_loss"):
        run.columns[name][-1] = None
    assert Figure("client_r2").of(run).number == 0.25


def test_a_target_that_no_run_reaches_is_the_bound_of_the_run_that_gave_up_first(finished_run):
    low = [finished_run(seed=seed, accuracies=[0.1] * length) for seed, length in ((0, 4), (1, 9))]
    assert estimate(Figure("rounds_to", 0.5), low).text(1) == "> 3 (0 of 2 reached)"


def test_rounds_after_the_last_one_and_runs_without_evaluation_are_left_out(runs):
    early = Figure("accuracy", last_round=2)
    assert [early.of(run).number for run in runs] == [0.6, 0.3, 0.6]
    assert estimate(Figure("client_loss"), runs) is None


@pytest.mark.parametrize(
    ("bests", "targets"),
    [
        ([0.5, 0.8], [0.4, 0.64, 0.76]),  # 50, 80 and 95 % of 0.8
        ([0.34], [0.17, 0.27, 0.32]),  # 0.272 and 0.323, rounded down
        ([0.02], [0.01, 0.016, 0.019]),  # in steps of a thousandth
        ([0.0], []),
        ([], []),
    ],
)
def test_sensible_targets(bests, targets):
    assert sensible_targets(bests) == targets


def test_what_a_target_takes_that_the_first_model_has_is_nothing(finished_run):
    run = finished_run("fedavg", 0, (0.3, 0.4), columns={"simulated_seconds": 5.0})
    run.columns["simulated_seconds"][0] = None  # as in metrics.jsonl
    values = [Figure(name, target=0.25).of(run) for name in ("rounds_to", "bytes_to", "seconds_to")]
    assert [value.number for value in values] == [0.0, 0.0, 0.0]
