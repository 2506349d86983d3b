"""Ranks and critical differences, by the worked example of Demsar (JMLR 2006), Table 6."""

from pathlib import Path

import pandas as pd
import pytest

from fedhet.report.blocks import Chart, Table
from fedhet.report.comparison import comparisons
from fedhet.report.layout import automatic_layout
from fedhet.report.ranks import Ranks, ranks_section
from fedhet.report.statistics import Figure

PUBLISHED = {"C4.5+m+cf": 1.964, "C4.5+m": 2.000, "C4.5+cf": 2.893, "C4.5": 3.143}


@pytest.mark.slow
def test_the_example_has_the_published_numbers():
    found = Ranks(pd.Series(PUBLISHED), settings=14)
    assert found.friedman == pytest.approx(9.28, abs=0.005)
    assert found.f_statistic == pytest.approx(3.69, abs=0.005)
    assert found.p_value < 0.05  # the critical value of F(3, 39) is 2.85
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)
    assert found.below("C4.5+m+cf") == []  # 3.143 - 1.964 is less


@pytest.mark.slow
def test_equal_ranks_in_all_settings_and_differences_beyond_the_critical_one():
    scores = pd.DataFrame([[9.0, 5.0, 1.0]] * 6, columns=list("abc"))
    found = Ranks.of(scores)
    assert found.p_value == 0.0
    assert found.critical_difference == pytest.approx(2.343 / 3**0.5, abs=1e-3)  # Demsar's Table 5
    assert [found.below(name) for name in "abc"] == [["c"], [], []]


def test_smaller_is_better_turns_ranks_round_and_equal_ones_share_them():
    scores = pd.DataFrame({"a": [1.0, 2.0], "b": [1.0, 3.0], "c": [4.0, 4.0]})
    assert Ranks.of(scores, larger_is_better=False).mean.to_dict() == {"a": 1.25, "b": 1.75, "c": 3}


@pytest.mark.slow
def test_a_page_ranks_the_rows_that_every_column_has(finished_run):
    percents = {"fedavg": (50, 60, 70), "fedpvr": (51, 61, 71), "moon": (40, 50, 60)}
    runs = [
        finished_run(method, 0, (0.1, percent / 100), partition__alpha=alpha)
        for method, each in percents.items()
        for alpha, percent in zip((0.1, 0.3, 1.0), each, strict=True)
    ]
    runs.append(finished_run("fedprox", 0, (0.1, 0.9), partition__alpha=0.1))
    found = comparisons(automatic_layout(runs), Figure("accuracy", percent=True))
    table, chart = (
        next(b for b in ranks_section(found, Path("report")) if isinstance(b, kind))
        for kind in (Table, Chart)
    )
    assert [[e.text for e in row[:2]] for row in table.rows] == [
        ["FedPVR", "1.00"],
        ["FedAvg", "2.00"],
        ["MOON", "3.00"],
    ]
    assert list(chart.pictures) == ["report_ranks"]
    assert ranks_section(found[:2], Path("report")) == []
