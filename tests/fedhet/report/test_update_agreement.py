"""Norm ratio, pairwise cosine and drift diversity on the page."""

import math

import pytest

from fedhet.report.blocks import Chart, Heading, Table
from fedhet.report.figures import agreement
from fedhet.report.run_data import Run


def run(method="fedavg", seed=0, values=(0.5, 0.6), *, sizes=4, alpha=1.0, **columns):
    """Return a run: the norm ratio is ``values`` from round 1 on, the others follow from it."""
    rounds = len(values)
    ratios = [None, *values]
    sizes = [None, *(sizes if isinstance(sizes, list) else [sizes] * rounds)]
    own = {
        "round": list(range(rounds + 1)),
        "accuracy": [0.5] * (rounds + 1),
        "clients": sizes,
        "norm_ratio": ratios,
        "update_cosine": [value and value - 0.5 for value in ratios],
        "drift_diversity": [value and 2 * value for value in ratios],
    }
    settings = {"partition.alpha": alpha, "clients": 20, "seed": seed}
    name = f"{method}{seed}{alpha}"
    return Run(name, 0, method, seed, "completed", settings=settings, columns={**own, **columns})


@pytest.fixture
def shown(section_of):
    """Return a function: the blocks of runs by their type, and the panels."""

    def blocks_by_type(runs):
        blocks, panels = section_of(agreement, runs, 2)  # one round in two is drawn
        return {type(block): block for block in blocks}, panels.get("agreement", [])

    return blocks_by_type


def texts(blocks):
    return {row[0].text: [entry.text for entry in row[1:]] for row in blocks[Table].rows}


def test_a_panel_a_figure_with_the_seeds_mean_and_band(shown):
    blocks, (ratio, cosine, diversity) = shown([run(), run(seed=1, values=(0.7, 0.6))])
    assert blocks[Heading].text == "How far updates agree"
    assert "One round in 2 is drawn, and all of the last 10." in blocks[Chart].caption
    (line,) = ratio.curves
    assert line.points.to_dict("list") == {
        "mean": [0.6, 0.6],
        "low": [0.5, 0.6],
        "high": [0.7, 0.6],
    }
    assert list(line.points.index) == [1, 2]
    assert list(cosine.curves[0].points["mean"]) == pytest.approx([0.1, 0.1])
    assert list(diversity.curves[0].points["mean"]) == pytest.approx([1.2, 1.2])
    assert [ratio.log, cosine.log, diversity.log] == [False, False, True]
    _, panels = shown([run(alpha=0.1, values=(0.3, 0.4)), run(alpha=1.0, values=(0.8, 0.9))])
    assert [panel.title for panel in panels] == ["alpha 0.1", "alpha 1"] * 3
    assert [one.y_range for one in panels[::2]] == [other.y_range for other in panels[1::2]]
    blocks, panels = shown([run(values=(0.5,))])  # a single round: the table alone
    assert ({*blocks}, panels) == ({Heading, Table}, [])


def test_dotted_is_where_orthogonal_updates_of_equal_length_lie(shown):
    blocks, panels = shown([run(values=(0.8, 0.9)), run("scaffold", values=(0.8, 0.9))])
    assert [panel.marks for panel in panels] == [[0.5], [0.0], [1.0]]
    labels = ["norm ratio (dotted: 1/√4)", "pairwise cosine (dotted: 0)"]
    assert [panel.y_label for panel in panels] == [*labels, "drift diversity (dotted: 1)"]
    assert "|S| = 4." in blocks[Chart].caption
    for panel in panels:
        low, high = panel.y_range
        assert all(low < value < high for value in [*panel.marks, *panel.curves[0].points["mean"]])
    # where the number of clients changes, the median is dotted
    runs = [run(values=(0.5,) * 3, sizes=[4, 9, 25]), run("scaffold", sizes=16)]
    blocks, (ratio, *_) = shown(runs)
    assert ratio.marks == pytest.approx([1 / 3, 1 / 4])
    assert ratio.y_label == "norm ratio (dotted: 1/√|S|)"
    assert "|S| is 4 to 25; dotted is a row's median" in blocks[Chart].caption


def test_the_table_has_the_means_over_the_last_ten_rounds(shown):
    # rounds 6 to 15: the mean of 6 to 15 is 10.5, and of twice that 21
    rising = [run(values=range(1, 16)), run(seed=1, values=[2 + n for n in range(1, 16)])]
    blocks, _ = shown([*rising, run("scaffold", values=(0.25, 0.75))])
    sd = math.sqrt(2)  # of 10.5 and 12.5
    assert list(blocks[Table].head) == [
        "method",
        "norm ratio",
        "pairwise cosine",
        "drift diversity",
    ]
    assert texts(blocks) == {
        "FedAvg": [f"11.500 ± {sd:.3f}", f"11.000 ± {sd:.3f}", f"23.000 ± {2 * sd:.3f}"],
        "SCAFFOLD": ["0.500", "0.000", "1.000"],
    }


def test_runs_without_the_columns_or_of_a_single_client_are_left_out(shown):
    columns = dict.fromkeys(("norm_ratio", "update_cosine", "drift_diversity"), [None] * 3)
    older = run("fedprox", **columns)
    alone = run("centralised", values=(1.0, 1.0), sizes=1, update_cosine=[None] * 3)
    assert shown([older]) == shown([alone]) == ({}, [])
    blocks, panels = shown([older, alone, run(), run(seed=1, **columns)])
    assert list(texts(blocks)) == ["FedAvg"]
    assert [line.runs for panel in panels for line in panel.curves] == [1, 1, 1]
    assert panels[0].marks == [0.5]
    blocks, panels = shown([run(update_cosine=[None] * 3)])
    assert [panel.y_label[:10] for panel in panels] == ["norm ratio", "drift dive"]
    assert texts(blocks)["FedAvg"] == ["0.550", "-", "1.100"]


def test_rounds_without_a_valid_reply_have_no_cohort(shown):
    """A run that diverges late: its rounds without replies make most of it."""
    blocks, panels = shown([run(sizes=[4, 4, 0, 0, 0], values=(0.5, 0.5, None, None, None))])
    assert "|S| = 4." in blocks[Chart].caption
    assert panels[0].marks == [0.5]  # 1 / sqrt(4)
