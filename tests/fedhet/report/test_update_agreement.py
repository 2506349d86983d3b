"""Norm ratio, pairwise cosine and drift diversity on the page."""

import math

import pytest

from fedhet.report.blocks import Heading, Key, Picture, Table
from fedhet.report.colors import keys_of
from fedhet.report.curves import Curve, common_range
from fedhet.report.data_file import ReportData, thinned
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import Run
from fedhet.report.update_agreement import agreement


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


def blocks_of(runs, path, every=1):
    layout = automatic_layout(runs)
    keys = keys_of([(line.label, line.method) for line in layout.lines])
    blocks = agreement(layout, keys, every, path / "report")
    return {type(block): block for block in blocks}


def texts(table):
    return {row[0].text: [entry.text for entry in row[1:]] for row in table.rows}


def test_a_panel_a_figure_with_the_seeds_mean_and_band(tmp_path, drawn):
    found = blocks_of([run(values=(0.5, 0.6)), run(seed=1, values=(0.7, 0.6))], tmp_path)
    assert found[Heading].text == "How far updates agree"
    assert found[Picture].name == "report_agreement"
    ratio, cosine, diversity = drawn["agreement"]
    (line,) = ratio.curves
    assert line.x == [1, 2]
    assert line.mean == pytest.approx([0.6, 0.6])
    assert line.low == [0.5, 0.6]
    assert line.high == [0.7, 0.6]
    assert cosine.curves[0].mean == pytest.approx([0.1, 0.1])
    assert diversity.curves[0].mean == pytest.approx([1.2, 1.2])
    assert [panel.log for panel in drawn["agreement"]] == [False, False, True]
    drawn.clear()
    found = blocks_of([run(values=(0.5,))], tmp_path)  # a single round: the table alone
    assert (set(found), drawn) == ({Heading, Table}, {})


def test_dotted_is_where_orthogonal_updates_of_equal_length_lie(tmp_path, drawn):
    runs = [run("fedavg", values=(0.8, 0.9)), run("scaffold", values=(0.8, 0.9))]
    caption = blocks_of(runs, tmp_path)[Picture].caption
    assert [panel.marks for panel in drawn["agreement"]] == [[0.5], [0.0], [1.0]]
    labels = ["norm ratio (dotted: 1/√4)", "pairwise cosine (dotted: 0)"]
    assert [panel.y_label for panel in drawn["agreement"]] == [
        *labels,
        "drift diversity (dotted: 1)",
    ]
    assert "|S| = 4." in caption
    for panel in drawn["agreement"]:
        low, high = panel.y_range
        assert all(low < value < high for value in [*panel.marks, *panel.curves[0].mean])
    # where the number of clients changes, the median is dotted
    runs = [run(values=(0.5,) * 3, sizes=[4, 9, 25]), run("scaffold", sizes=16)]
    found = blocks_of(runs, tmp_path)
    assert drawn["agreement"][0].marks == pytest.approx([1 / 3, 1 / 4])
    assert drawn["agreement"][0].y_label == "norm ratio (dotted: 1/√|S|)"
    assert "|S| is 4 to 25; dotted is a row's median" in found[Picture].caption


def test_three_panels_a_column_with_one_range_for_each_figure(tmp_path, drawn):
    blocks_of([run(alpha=0.1, values=(0.3, 0.4)), run(alpha=1.0, values=(0.8, 0.9))], tmp_path)
    assert [panel.title for panel in drawn["agreement"]] == ["alpha 0.1"] * 3 + ["alpha 1"] * 3
    for one, other in zip(drawn["agreement"][:3], drawn["agreement"][3:], strict=True):
        assert one.y_label == other.y_label
        assert one.y_range == other.y_range
        low, high = one.y_range
        assert all(low < y < high for panel in (one, other) for y in panel.curves[0].mean)


def test_the_table_has_the_means_over_the_last_ten_rounds(tmp_path, drawn):
    # rounds 6 to 15: the mean of 6 to 15 is 10.5, and of twice that 21
    rising = [run(values=range(1, 16)), run(seed=1, values=[2 + n for n in range(1, 16)])]
    short = [run("scaffold", values=(0.25, 0.75))]
    table = blocks_of(rising + short, tmp_path)[Table]
    sd = math.sqrt(2)  # of 10.5 and 12.5
    assert list(table.head) == ["", "norm ratio", "pairwise cosine", "drift diversity"]
    assert texts(table) == {
        "fedavg": [f"11.500 ± {sd:.3f}", f"11.000 ± {sd:.3f}", f"23.000 ± {2 * sd:.3f}"],
        "scaffold": ["0.500", "0.000", "1.000"],
    }


def test_runs_without_the_columns_or_of_a_single_client_are_left_out(tmp_path, drawn):
    columns = dict.fromkeys(("norm_ratio", "update_cosine", "drift_diversity"), [None] * 3)
    older = run("fedprox", **columns)
    assert blocks_of([older], tmp_path) == {}
    found = blocks_of([older, run(), run(seed=1, **columns)], tmp_path)
    assert list(texts(found[Table])) == ["fedavg"]
    assert [line.runs for panel in drawn["agreement"] for line in panel.curves] == [1, 1, 1]
    alone = run("centralised", values=(1.0, 1.0), sizes=1, update_cosine=[None] * 3)
    assert blocks_of([alone], tmp_path) == {}
    blocks_of([alone, run(sizes=4)], tmp_path)
    assert drawn["agreement"][0].marks == [0.5]
    assert [line.key.label for line in drawn["agreement"][0].curves] == ["fedavg"]
    found = blocks_of([run(update_cosine=[None] * 3)], tmp_path)
    assert [panel.y_label.split(" (")[0] for panel in drawn["agreement"]] == [
        "norm ratio",
        "drift diversity",
    ]
    assert texts(found[Table])["fedavg"] == ["0.550", "-", "1.100"]


def test_means_are_of_all_late_rounds_where_the_data_file_has_few(tmp_path, drawn):
    runs = [run(str(n), values=[1 + (n + i * i) % 7 for i in range(600)]) for n in range(14)]
    data = thinned(ReportData(runs))
    assert data.every == 2
    before = texts(blocks_of(runs, tmp_path)[Table])
    found = blocks_of(data.runs, tmp_path, data.every)
    assert texts(found[Table]) == before
    assert "One round in 2 is drawn, and all of the last 10." in found[Picture].caption


def test_a_range_on_a_logarithmic_scale_has_the_same_margin_at_both_ends():
    line = Curve(Key("a", 0), [1, 2], [2.0, 40.0], [0.1, 40.0], [2.0, 100.0], 2)
    low, high = common_range([line], [1.0], log=True)
    assert high / 100.0 == pytest.approx(0.1 / low)  # 4 % of three decades
    assert math.log10(high / low) == pytest.approx(3 * 1.08)
    flat = Curve(Key("a", 0), [1], [1.0], [1.0], [1.0], 1)
    assert common_range([flat], [1.0], log=True) == (0.5, 2.0)
