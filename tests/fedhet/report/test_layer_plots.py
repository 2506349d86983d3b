"""Figures of the layers: from a run's files onto the page, and through the data file."""

import pytest

from fedhet.common.results import write_rows
from fedhet.report.blocks import Heading, Table
from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.figures import layers
from fedhet.report.layer_data import (
    LAYERS,
    MOST_ROUNDS,
    SIMILARITY,
    LayerFigures,
    read_layers,
)
from fedhet.report.run_data import Run

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


def run(figures, method="fedavg", seed=0, alpha=0.1):
    settings = {"partition.alpha": alpha, "seed": seed}
    return Run("a run", 0, method, seed, "completed", settings=settings, layers=figures)


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
    runs = [run(found), run(LayerFigures(), "moon")]
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
    runs = [run(found), run(found, "fedpvr"), run(found, alpha=100.0), run(LayerFigures(), "moon")]
    blocks, drawn = section_of(layers, runs)
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
    assert section_of(layers, runs[3:]) == ([], {})
    write(tmp_path, factor=3.0)  # seeds are averaged
    _, drawn = section_of(layers, [run(found), run(read_layers(tmp_path, 10), seed=1)])
    (line,) = drawn["layers"][0].curves
    assert line.points.to_numpy().tolist() == [[4.0, 2.0, 6.0], [8.0, 4.0, 12.0]]
