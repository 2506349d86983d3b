"""FedDW's Figure 4: class shares against the norms of clients' heads."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import spearmanr

from fedhet.report.blocks import Heading, Listing, Picture, Table
from fedhet.report.class_counts import partition_of, partitions_of
from fedhet.report.layout import automatic_layout
from fedhet.report.paper_figures import with_figures
from reproductions.feddw.weight_norms import Norms, norms_section
from tests.reproductions.classifier_files import write_own_heads

CLIENTS, CLASSES = 5, 10


@pytest.fixture
def counts():
    """Skewed counts, with absent classes, and a client without examples."""
    drawn = np.random.default_rng(0).dirichlet(np.full(CLASSES, 0.3), size=CLIENTS)
    counts = np.floor(200 * drawn).astype(int)
    counts[2] = 0
    return counts


@pytest.fixture
def write(finished_run):
    def write_and_read(seed=0, classes=CLASSES):
        heads = np.random.default_rng(seed).normal(size=(CLIENTS, classes, 4))
        written = finished_run("local", seed, paper={"name": "feddw"})
        write_own_heads(written.folder, dict(enumerate(heads)))
        (run,) = with_figures([written], print)
        return run, np.float32(heads)

    return write_and_read


def counted(runs, counts):
    names = [f"name{label}" for label in range(counts.shape[1])]
    kept = {"class_names": names, "counts": counts.tolist()}
    return [dataclasses.replace(partition, **kept) for partition in partitions_of(runs)]


def blocks_of(runs, partitions, tmp_path):
    blocks = norms_section(automatic_layout(runs), lambda: partitions, tmp_path / "report")
    return {type(block): block for block in blocks}


@pytest.mark.slow
def test_the_correlations_are_within_clients(write, counts, tmp_path):
    run, heads = write()
    found = blocks_of([run], counted([run], counts), tmp_path)
    every, held = [], []
    for client in (0, 1, 3, 4):
        norms = np.sqrt((heads[client] ** 2).sum(axis=1))
        every.append(spearmanr(counts[client], norms).statistic)
        own = counts[client] > 0
        held.append(spearmanr(counts[client][own], norms[own]).statistic)
    (row,) = found[Table].rows
    negative = sum(value < 0 for value in every)
    means = [f"{np.mean(every):.2f}", f"{np.mean(held):.2f}"]
    assert [entry.text for entry in row] == ["local", *means, f"{negative} of 4"]
    assert 0 < negative < 4
    assert (tmp_path / "report_norms.png").stat().st_size > 10_000


def test_the_picked_clients_have_the_lowest_median_and_highest_correlation():
    """Norms in the order of the shares for client 3 alone, then more and more of them swapped."""
    shares = np.tile(np.arange(1.0, 6.0), (5, 1))
    norms = np.array(
        [[2, 1, 3, 4, 5], [5, 4, 3, 2, 1], [3, 2, 1, 4, 5], [1, 2, 3, 4, 5], [4, 5, 3, 2, 1]]
    )
    shown = Norms("a", range(5), shares, norms.astype(float), list("abcde"))
    # by hand, 1 - 6 sum d^2 / (5 * 24): 0.9, -1, 0.6, 1, -0.9
    assert shown.correlations() == pytest.approx([0.9, -1, 0.6, 1, -0.9])
    assert shown.picked() == [1, 2, 3]
    norms = np.array([[1.0, 2.0, 1.0], [3.0, 3.0, 6.0]])
    shares = np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    # by hand: ranks of the shares (2.5, 2.5, 1) and (3, 1.5, 1.5), of the norms (1.5, 3, 1.5) twice
    assert Norms("a", [4, 7], shares, norms, "abc").correlations() == pytest.approx([0.5, -0.5])


@pytest.mark.slow
def test_equal_shares_have_no_correlation_and_many_classes_are_thinned(write, tmp_path):
    run, _ = write()
    found = blocks_of([run], counted([run], np.full((CLIENTS, CLASSES), 3)), tmp_path)
    assert [entry.text for entry in found[Table].rows[0][1:]] == ["-", "-", "0 of 0"]
    run, _ = write(classes=100)
    many = np.tile(np.arange(100), (CLIENTS, 1))
    picture = blocks_of([run], counted([run], many), tmp_path)[Picture]
    assert "name" not in picture.svg  # numbers of every eleventh, from the largest share down
    assert all(f">{label}<" in picture.svg for label in (99, 88, 55))
    assert "Of many classes 10 are drawn" in picture.caption


@pytest.mark.usefixtures("no_pictures")
def test_only_the_partition_of_the_runs_own_seed_counts(write, finished_run, counts, tmp_path):
    run, _ = write(seed=3)
    other, _ = write(seed=4)
    plain = finished_run("fedavg", 0)
    partitions = counted([other], counts)
    assert partition_of(other, partitions) is partitions[0]
    assert set(blocks_of([other], partitions, tmp_path)) == {Heading, Table}
    assert partition_of(run, partitions) is None
    found = blocks_of([run], partitions, tmp_path)
    assert found[Listing].items == ["local: its partition is not counted"]
    assert Table not in found
    failed = [dataclasses.replace(partition, error="no data") for partition in partitions]
    assert blocks_of([other], failed, tmp_path)[Listing].items == ["local: no data"]
    assert blocks_of([run], [], tmp_path) == {}
    # the partition that is counted is that of a run with heads, even if another seed is lower
    assert [p.settings["seed"] for p in partitions_of([plain, run])] == [3]
    assert norms_section(automatic_layout([plain]), pytest.fail, tmp_path) == []
