"""SL beside CR on the page."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from fedhet.report import command
from fedhet.report.blocks import Gallery, Heading, Table
from fedhet.report.data_file import Partition
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import read_run
from reproductions.feddw import class_relations as module
from reproductions.feddw.class_relations import class_relations
from tests.reproductions.classifier_files import random_relations, write_soft_labels

CLASSES = 5


@pytest.fixture
def write(write_run):
    def write_and_read(number, method="feddw", seed=0, classes=CLASSES, **settings):
        folder = write_run(method, seed, **settings)
        write_soft_labels(folder, *random_relations(number, classes))
        return read_run(folder, folder.name, 0)

    return write_and_read


@pytest.fixture
def conditions(write):
    """The paper's three: FedAvg (mu = 0) iid, FedAvg non-iid, FedDW non-iid; two seeds of each."""
    key = "strategy__feddw__mu"
    return [
        write(number, seed=seed, partition__name=partition, **{key: mu})
        for number, mu, partition in ((0, 0, "iid"), (1, 0, "dirichlet"), (2, 0.1, "dirichlet"))
        for seed in (0, 1)
    ]


def blocks_of(runs, tmp_path, partitions=()):
    blocks = class_relations(automatic_layout(runs), lambda: partitions, tmp_path / "report")
    return {type(block): block for block in blocks}


@pytest.mark.slow
def test_the_three_conditions_are_side_by_side_and_named(conditions, tmp_path):
    found = blocks_of(conditions, tmp_path)
    assert found[Heading].text == "Class relations"
    assert [drawing.label for drawing in found[Gallery].drawings] == [
        f"{matrix} · {run}"
        for run in ("feddw, mu 0 · dirichlet", "feddw, mu 0 · iid", "feddw, mu 0.1 · dirichlet")
        for matrix in ("SL", "CR")
    ]
    assert (tmp_path / "report_relations.png").stat().st_size > 10_000
    assert "mu is 0 in feddw, mu 0 · dirichlet; feddw, mu 0 · iid:" in found[Gallery].caption


def test_the_numbers_are_those_of_the_first_seed(conditions, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_plot", lambda: False)
    rows = blocks_of(conditions, tmp_path)[Table].rows
    for number, row in zip((1, 0, 2), rows, strict=True):
        labels, weight = random_relations(number, CLASSES)
        powers = np.exp(weight.astype(float) @ weight.T)
        head = powers / powers.sum(axis=1, keepdims=True)
        off = ~np.eye(CLASSES, dtype=bool)
        assert row[1].text == f"{np.mean((labels - head) ** 2):.3g}"
        assert row[2].text == f"{spearmanr(labels[off], head[off]).statistic:.2f}"


@pytest.mark.slow
def test_runs_without_soft_labels_have_no_section(write_run, write, tmp_path):
    plain = read_run(write_run(), "plain", 0)
    assert blocks_of([plain], tmp_path) == {}
    assert len(blocks_of([plain, write(0)], tmp_path)[Table].rows) == 1


def test_a_seed_without_a_checkpoint_gives_way_to_the_next(write_run, write, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_plot", lambda: False)
    runs = [read_run(write_run("feddw", 0), "a", 0), write(7, seed=1)]
    (row,) = blocks_of(runs, tmp_path)[Table].rows
    assert row[1].text == f"{runs[1].relations.distance:.3g}"


@pytest.mark.flower  # it draws pages
def test_names_and_numbers_stand_where_they_can_be_read(write, tmp_path):
    """Names up to 20 classes, percentages in the cells up to 10."""
    for classes in (10, 20, 100):
        names = [f"name{label:03}" for label in range(classes)]
        partition = Partition("p", {"task.name": "digits"}, names, clients=1)
        run = write(0, classes=classes, seed=classes)
        found = blocks_of([run], tmp_path, [partition])[Gallery]
        svg = found.drawings[0].svg
        assert ("name007" in svg) == (classes <= 20)
        small = [value / 1e4 for value in run.relations.soft_labels[1] if 1_000 < value < 99_000]
        percentages = [f">{value:.1f}<" for value in small]
        assert all(text in svg for text in percentages) == (classes == 10)
        assert ("Numbers are percentages" in found.caption) == (classes == 10)


def test_the_scale_is_of_all_entries_off_the_diagonal(conditions):
    """One for all matrices of as many classes."""
    matrices = [np.array(run.relations.soft_labels) / 1e6 for run in conditions]
    off = [m[i, j] for m in matrices for i in range(5) for j in range(5) if i != j]
    scale = module._scales(matrices)[CLASSES]
    assert scale.high == max(off)
    assert np.mean(np.array(off) < scale.low) == pytest.approx(0.05, abs=0.01)
    identity = module._scales([np.eye(10), np.eye(4)])
    assert sorted(identity) == [4, 10]
    assert 0 < identity[4].low < identity[4].high


def test_percentages_have_three_letters_at_the_most():
    shares = (0.0, 0.0004, 0.0006, 0.0994, 0.0996, 0.5, 0.9996, 1.0)
    assert [module._percent(share) for share in shares] == [
        *("0", "0", "0.1", "9.9", "10", "50", "100", "100")
    ]


def test_very_many_runs_are_in_the_table_alone(write, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_SHOWN", 1)
    runs = [write(n, strategy__feddw__mu=float(n)) for n in range(3)]
    found = blocks_of(runs, tmp_path)
    assert len(found[Gallery].drawings) == 2
    assert "2 further runs are only in the table" in found[Gallery].caption
    assert len(found[Table].rows) == 3


def test_without_matplotlib_the_table_comes(write, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_plot", lambda: False)
    found = blocks_of([write(0)], tmp_path)
    assert set(found) == {Heading, Table}


@pytest.mark.flower  # it draws pages
def test_the_page_is_made_again_from_its_data_file(conditions, tmp_path):
    command.main([str(tmp_path / "sweep"), "--no-partitions"])
    first = tmp_path / "sweep" / "report"
    command.main([str(first / "report.json"), "--no-partitions", "--out", str(tmp_path / "again")])
    written = {path.name: path.read_bytes() for path in first.iterdir()}
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == written
    assert b"Class relations" in written["report.html"]
    assert b"report_relations.png" in written["report.md"]
