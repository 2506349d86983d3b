"""Rankings, paired differences and verdicts, by Student's t of hand-worked differences.

The 97.5 % quantile of t with 2 degrees of freedom is 4.3027 (any table): of three differences with
the standard deviation 1 the half width of the interval is 4.3027 / sqrt(3) = 2.484.
"""

import pytest

from fedhet.report.comparison import check_baseline, comparisons, ranked_table, verdict
from fedhet.report.layout import automatic_layout
from fedhet.report.statistics import Estimate, Figure
from tests.refused import refused

ACCURACY = Figure("accuracy", percent=True)


@pytest.fixture
def compared(finished_run):
    """Return a function: the comparison of methods' final accuracies (%) by seed, from 0 on."""

    def compare(baseline="", figure=ACCURACY, **finals):
        runs = [
            finished_run(method, seed, (0.1, percent / 100))
            for method, percents in finals.items()
            for seed, percent in enumerate(percents)
            if percent is not None
        ]
        return comparisons(automatic_layout(runs), figure, baseline)

    return compare


def test_intervals_are_students_t_and_equal_values_have_none():
    found = Estimate([2.0, 3.0, 4.0])
    assert (found.mean, found.count, found.sign) == (3.0, 3, 1)
    assert found.interval == pytest.approx((3 - 2.484, 3 + 2.484), abs=1e-3)
    assert Estimate([1.0, 2.0, 3.0]).sign == 0  # [-0.48, 4.48]
    assert Estimate([-2.0, -3.0, -4.0]).sign == -1
    assert Estimate([5.0]).interval is None
    assert Estimate([5.0, 5.0]).interval is None
    bounded = Estimate([98.0, 99.0, 100.0], most=100.0)
    assert bounded.interval == pytest.approx((96.516, 100.0), abs=1e-3)


@pytest.mark.slow
def test_rows_are_ranked_and_paired_with_the_baseline_over_common_seeds(compared):
    """FedPVR minus FedAvg: 2, 3 and 4, though both vary by 10 between the seeds."""
    (found,) = compared(fedavg=(50, 60, 70), fedpvr=(52, 63, 74, 99), moon=(49, 62, 69))
    table = ranked_table([found])
    rows = {row[0].text: [entry.text for entry in row[1:]] for row in table.rows}
    assert list(rows) == ["FedPVR", "FedAvg", "MOON"]
    assert [row[0].best for row in table.rows] == [True, False, False]
    assert rows["FedPVR"][4:] == ["+3.0", "[+0.5, +5.5]", "3"]
    assert rows["FedAvg"][:5] == ["2", "60.0 ± 10.0", "[35.2, 84.8]", "3", "the baseline"]
    assert rows["MOON"][4] == "+0.0"  # -1, 2 and -1
    assert "not corrected for 2 comparisons" in table.caption
    assert verdict([found]) == [
        "FedPVR is 3.0 points above FedAvg [0.5, 5.5] over 3 common seeds.",
        "No difference to FedAvg can be seen for MOON.",
    ]
    (found,) = compared(fedavg=(50, 60, 70), fedpvr=(50.030, 60.036, 70.042))
    assert verdict([found]) == [
        "FedPVR is 0.04 points above FedAvg [0.02, 0.05] over 3 common seeds."
    ]  # 0.036 [0.0211, 0.0509], and no 0.0 [0.0, 0.0]
    one = 100 / 360  # of 360 examples one less with each seed: no interval of rounding errors
    (found,) = compared(fedavg=(36 * one, 133 * one), moon=(35 * one, 132 * one))
    assert "[" not in "".join(verdict([found]))
    (found,) = compared("FedPVR", fedavg=(50, 60, 70), fedpvr=(52, 63, 74))
    assert found.baseline == "FedPVR"
    assert verdict([found]) == [
        "The best mean is that of FedPVR: final accuracy 63.0 ± 11.0 %.",
        "FedAvg is 3.0 points below FedPVR [0.5, 5.5] over 3 common seeds.",
    ]


@pytest.mark.parametrize(
    ("finals", "sentence"),
    [
        (
            {"fedavg": (50, 60, 70), "fedpvr": (51, 62, 73)},
            "No difference can be seen between FedPVR and FedAvg: +2.0 points [-0.5, +4.5] over 3 "
            "common seeds.",
        ),
        (
            {"fedavg": (50,), "fedpvr": (53, 60)},
            "FedPVR is 3.0 points above FedAvg with one common seed: no interval can be said of "
            "one seed.",
        ),
        (
            {"fedavg": (50, None), "fedpvr": (None, 60)},
            "FedPVR has the best mean, final accuracy 60.0 %; it has no seed in common with ",
        ),
        (
            {"fedavg": (50, 60, 70), "fedpvr": (55, 66, 74), "moon": (40, 50, 60)},
            "MOON is 10.0 points below FedAvg with each of 3 common seeds.",
        ),
        (
            {"fedavg": (50, 60, 70), "fedpvr": (55, 66, 74), "moon": (50, 60, 70)},
            "No difference to FedAvg can be seen for MOON.",
        ),
        ({"fedpvr": (50, 52)}, "FedPVR: final accuracy 51.0 ± 1.4 %."),
        ({"fedpvr": (50,)}, "FedPVR: final accuracy 50.0 %. One seed: no interval can be said."),
    ],
)
def test_a_verdict_says_no_more_than_the_seeds_show(compared, finals, sentence):
    (found,) = compared(**finals)
    about = verdict([found])[1 if "MOON" in sentence else 0]
    assert about.startswith(sentence)


def test_smaller_losses_are_better_and_a_missed_target_is_last(compared):
    """Losses of ``rows_of`` are 1 / round; of the targets' rounds a bound is no number."""
    (found,) = compared(figure=Figure("rounds_to", 0.55), fedavg=(60, 60), fedpvr=(50, 60))
    assert [row.label for row in found.rows] == ["FedAvg", "FedPVR"]
    assert found.rows[1].score.interval is None
    assert found.rows[1].difference.count == 1
    assert [row[1].text for row in ranked_table([found]).rows] == ["1", "-"]
    assert verdict([found])[-1].endswith("The target was reached by FedPVR in 1 of 2 seeds.")
    (found,) = compared(figure=Figure("rounds_to", 0.7), fedavg=(60, 60), fedpvr=(50, 60))
    assert [row[1].text for row in ranked_table([found]).rows] == ["-", "-"]
    assert not any(entry.best for row in ranked_table([found]).rows for entry in row)
    assert verdict([found])[0] == "No row has reached the target in all of its seeds."
    assert not Figure("loss").larger_is_better
    assert not Figure("best_mae").larger_is_better
    assert Figure("best_f1").larger_is_better


def test_a_difference_is_seen_whatever_the_unit_of_the_scores(finished_run):
    """Errors of 1e-10 differ by a third, and accuracies that differ by rounding do not."""
    runs = [
        finished_run(method, seed, (0.1, 0.1), columns={"loss": loss})
        for method, losses in (("fedavg", (6.0e-10, 6.1e-10, 6.2e-10)), ("moon", (2e-10,) * 3))
        for seed, loss in enumerate(losses)
    ]
    (found,) = comparisons(automatic_layout(runs), Figure("loss"))
    gap = found.rows[0].difference
    assert (found.rows[0].label, gap.count, gap.sign) == ("MOON", 3, -1)
    assert gap.mean == pytest.approx(-4.1e-10)
    assert Estimate([1e-12, 2e-12], scale=60.0).interval is None
    assert not Estimate([1e-12, 1e-12], scale=60.0).is_seen


def test_a_baseline_of_no_completed_run_is_refused():
    with refused("--baseline", "fedavg"):
        check_baseline([], "fedavg")
