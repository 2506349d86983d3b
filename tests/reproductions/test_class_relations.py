"""FedDW's Figure 8: soft labels beside the relations of the classifier's weight."""

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import spearmanr

from fedhet.report.blocks import Heading, Picture, Table
from fedhet.report.layout import automatic_layout
from fedhet.report.paper_figures import with_figures
from reproductions.feddw import class_relations as module
from reproductions.feddw.class_relations import relations_section
from tests.reproductions.classifier_files import random_relations, write_soft_labels

CLASSES = 5


@pytest.fixture
def write(finished_run):
    """Write a run whose soft labels and weight follow from ``number``."""

    def write_and_read(number, seed=0, **settings):
        run = finished_run("feddw", seed, paper={"name": "feddw"}, **settings)
        write_soft_labels(run.folder, *random_relations(number, CLASSES))
        return run

    return write_and_read


def blocks_of(runs, tmp_path):
    runs = with_figures(runs, print)
    blocks = relations_section(automatic_layout(runs), list, tmp_path / "report")
    return {type(block): block for block in blocks}


@pytest.mark.slow
def test_the_conditions_are_side_by_side_with_the_numbers_of_the_first_seed(write, tmp_path):
    """The paper's three: FedAvg (mu = 0) iid, FedAvg non-iid, FedDW non-iid; two seeds of each."""
    conditions = [
        write(number, seed=seed, partition__name=partition, strategy__feddw__mu=mu)
        for number, mu, partition in ((0, 0, "iid"), (1, 0, "dirichlet"), (2, 0.1, "dirichlet"))
        for seed in (0, 1)
    ]
    found = blocks_of(conditions, tmp_path)
    names = [f"feddw, mu {name}" for name in ("0 · dirichlet", "0 · iid", "0.1 · dirichlet")]
    assert all(f"{kind} · {name}" in found[Picture].svg for kind in ("SL", "CR") for name in names)
    assert (tmp_path / "report_relations.png").stat().st_size > 10_000
    assert "mu is 0 in feddw, mu 0 · dirichlet; feddw, mu 0 · iid:" in found[Picture].caption
    for number, name, row in zip((1, 0, 2), names, found[Table].rows, strict=True):
        labels, weight = random_relations(number, CLASSES)
        head = softmax(weight.astype(float) @ weight.T, axis=1)
        off = ~np.eye(CLASSES, dtype=bool)
        distance, ranks = np.mean((labels - head) ** 2), spearmanr(labels[off], head[off])
        texts = [name, f"{distance:.3g}", f"{ranks.statistic:.2f}"]
        assert [entry.text for entry in row] == texts


@pytest.mark.usefixtures("no_pictures")
def test_runs_without_soft_labels_give_way_to_the_next_seed(finished_run, write, tmp_path):
    plain = finished_run("feddw", 0, paper={"name": "feddw"})
    assert blocks_of([plain], tmp_path) == {}
    found = blocks_of([plain, write(7, seed=1)], tmp_path)
    assert set(found) == {Heading, Table}
    assert len(found[Table].rows) == 1


def test_the_scale_is_of_all_entries_off_the_diagonal():
    """One scale for all matrices with the same number of classes."""
    matrices = [random_relations(number, CLASSES)[0] for number in range(6)]
    off = [m[i, j] for m in matrices for i in range(5) for j in range(5) if i != j]
    low, high = module._limits(matrices)[CLASSES]
    assert high == max(off)
    assert np.mean(np.array(off) < low) == pytest.approx(0.05, abs=0.01)
    identity = module._limits([np.eye(10), np.eye(4)])
    assert sorted(identity) == [4, 10]
    assert 0 < identity[4][0] < identity[4][1]
