"""The sections of update agreement and of layers, and the layers' way through the files."""

import math

import pytest

from fedhet.common.results import write_rows
from fedhet.report import figures
from fedhet.report.blocks import Chart, Heading, Table
from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.layer_data import LAYERS, MOST_ROUNDS, SIMILARITY, LayerFigures, read_layers
from fedhet.report.run_data import Run


def a_run(method="fedavg", seed=0, alpha=0.1, **fields):
    settings = {"partition.alpha": alpha, "clients": 20, "seed": seed}
    name = f"{method}{seed}{alpha}"
    return Run(name, 0, method, seed, "completed", settings=settings, **fields)


# ---- norm ratio, pairwise cosine and drift diversity ---------------------------------------------


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
    return a_run(method, seed, alpha, columns={**own, **columns})


@pytest.fixture
def shown(section_of):
    """Return a function: the blocks of runs by their type, and the panels."""

    def blocks_by_type(runs):
        blocks, panels = section_of(figures.agreement, runs, 2)  # one round in two is drawn
        return {type(block): block for block in blocks}, panels.get("agreement", [])

    return blocks_by_type


def texts(blocks):
    return {row[0].text: [entry.text for entry in row[1:]] for row in blocks[Table].rows}


def test_a_panel_a_figure_with_the_seeds_mean_and_band(shown):
    blocks, (ratio, cosine, diversity) = shown([run(), run(seed=1, values=(0.7, 0.6))])
    assert blocks[Heading].text == "How far updates agree"
    assert "One round in 2 is drawn, and all of the last 10." in blocks[Chart].caption
    (line,) = ratio.curves
    points = {"mean": [0.6, 0.6], "low": [0.5, 0.6], "high": [0.7, 0.6]}
    assert line.points.to_dict("list") == points
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
    # rounds without a valid reply, most of a run that diverges late, have no cohort
    blocks, panels = shown([run(sizes=[4, 4, 0, 0, 0], values=(0.5, 0.5, None, None, None))])
    assert "|S| = 4." in blocks[Chart].caption
    assert panels[0].marks == [0.5]  # 1 / sqrt(4)


def test_the_table_has_the_means_over_the_last_ten_rounds(shown):
    # rounds 6 to 15: the mean of 6 to 15 is 10.5, and of twice that 21
    rising = [run(values=range(1, 16)), run(seed=1, values=[2 + n for n in range(1, 16)])]
    blocks, _ = shown([*rising, run("scaffold", values=(0.25, 0.75))])
    sd = math.sqrt(2)  # of 10.5 and 12.5
    head = ["method", "norm ratio", "pairwise cosine", "drift diversity"]
    assert blocks[Table].head == head
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


# ---- layers -------------------------------------------------------------------------------------

SHAPES = {"a.weight": [4, 3], "a.bias": [4], "head.weight": [2, 4]}


def write(folder, rounds=3, factor=1.0):
    """Diversity of a.weight is the round, of the head twice that; the bias's updates cancel."""
    rows = [{"round": 0, "shapes": SHAPES}]
    for t in range(1, rounds + 1):
        diversity = {"a.weight": factor * t, "head.weight": 2.0 * factor * t}
        norms = dict.fromkeys(SHAPES, 0.5)
        rows.append({"round": t, "drift_diversity": diversity, "update_norm": norms})
    cka = {"a": [[1, 0.9, 0.6], [0.9, 1, None], [0.6, None, 1]], "head": [[1, 0.2]] * 3}
    write_rows(folder / LAYERS, rows)
    write_rows(folder / SIMILARITY, [{"round": t, "cka": cka} for t in (1, rounds)])


def test_figures_are_read_from_the_files(tmp_path):
    write(tmp_path, rounds=3)
    found = read_layers(tmp_path, late_rounds=2)
    assert found.tensors == list(SHAPES)
    assert found.matrices == [0, 2]
    assert found.rounds == [1, 2, 3]
    assert found.diversity == [[1, None, 2], [2, None, 4], [3, None, 6]]
    assert found.late == [2.5, None, 5.0]
    assert found.norms == [0.5, 0.5, 0.5]
    assert found.layers == ["a", "head"]
    assert found.compared == [1, 3]
    assert found.similarity[-1] == [0.75, 0.2]
    runs = [a_run(layers=found), a_run("moon")]
    assert [r.layers for r in parse(to_text(ReportData(runs)), "it").runs] == [
        found,
        LayerFigures(),
    ]
    write(tmp_path, rounds=100)  # some are kept, and the mean is of all late ones
    found = read_layers(tmp_path, late_rounds=10)
    assert len(found.rounds) <= MOST_ROUNDS
    assert (found.rounds[0], found.rounds[-1], found.late[0]) == (1, 100, 95.5)


@pytest.mark.parametrize(
    "text", ["", '{"round": 1}\n', "{\n", '{"round": 1, "drift_diversity": 3}\n']
)
def test_files_that_are_missing_or_broken_are_no_figures(text, tmp_path):
    assert read_layers(tmp_path, 10) == LayerFigures()
    (tmp_path / LAYERS).write_text(text)
    assert read_layers(tmp_path, 10) == LayerFigures()


def test_the_page_has_layers_rounds_and_similarity(tmp_path, section_of):
    write(tmp_path)
    found = read_layers(tmp_path, 10)
    runs = [a_run(layers=found), a_run("fedpvr", layers=found), a_run("moon")]
    runs.insert(2, a_run(alpha=100.0, layers=found))
    blocks, drawn = section_of(figures.layers, runs)
    assert blocks[0] == Heading(3, "Layers")
    assert [panel.title for panel in drawn["layers"]] == ["alpha 0.1", "alpha 100"]
    profile, _ = drawn["layers"]
    assert [line.key.label for line in profile.curves] == ["FedAvg", "FedPVR"]
    assert profile.curves[0].points["mean"].to_dict() == {0.0: 2.0, 2.0: 4.0}
    assert profile.log
    rounds = drawn["layers_rounds"]
    assert [panel.y_label for panel in rounds] == ["a.weight"] * 2 + ["head.weight"] * 2
    assert list(rounds[2].curves[0].points["mean"]) == [2.0, 4.0, 6.0]
    assert list(drawn["similarity"][0].curves[0].points["mean"]) == [0.75, 0.2]
    diversity, norms, alike = [block for block in blocks if isinstance(block, Table)]
    row = next(row for row in diversity.rows if row[1].text == "FedPVR")
    assert [entry.text for entry in row[2:]] == ["2.000", "4.000"]
    assert norms.rows[0][2].text == "0.500"
    assert [entry.text for entry in alike.rows[0][2:]] == ["0.750", "0.200"]
    assert section_of(figures.layers, runs[3:]) == ([], {})
    write(tmp_path, factor=3.0)  # seeds are averaged
    both = [a_run(layers=found), a_run(seed=1, layers=read_layers(tmp_path, 10))]
    _, drawn = section_of(figures.layers, both)
    (line,) = drawn["layers"][0].curves
    assert line.points.to_numpy().tolist() == [[4.0, 2.0, 6.0], [8.0, 4.0, 12.0]]
