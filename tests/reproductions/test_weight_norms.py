"""Class shares against the norms of clients' heads on the page."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import spearmanr

from fedhet.report import command
from fedhet.report.blocks import Gallery, Heading, Listing, Table
from fedhet.report.class_counts import partition_of, partitions_of
from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.layout import automatic_layout
from fedhet.report.run_data import read_run
from reproductions.feddw import weight_norms as module
from reproductions.feddw.weight_norms import Norms, weight_norms
from tests.reproductions.classifier_files import write_own_heads

CLIENTS, CLASSES = 5, 10


@pytest.fixture
def counts():
    """Who holds what: skewed, with absent classes, and a client without examples."""
    drawn = np.random.default_rng(0).dirichlet(np.full(CLASSES, 0.3), size=CLIENTS)
    counts = np.floor(200 * drawn).astype(int)
    counts[2] = 0
    return counts


@pytest.fixture
def write(write_run):
    def write_and_read(method="local", seed=0, classes=CLASSES, **settings):
        heads = np.random.default_rng(seed).normal(size=(CLIENTS, classes, 4))
        folder = write_run(method, seed, **settings)
        write_own_heads(folder, dict(enumerate(heads)))
        return read_run(folder, folder.name, 0), np.float32(heads)

    return write_and_read


def counted(runs, counts):
    names = [f"name{label}" for label in range(counts.shape[1])]
    return [
        dataclasses.replace(partition, class_names=names, counts=counts.tolist())
        for partition in partitions_of(runs)
    ]


def blocks_of(runs, partitions, tmp_path):
    blocks = weight_norms(automatic_layout(runs), lambda: partitions, tmp_path / "report")
    return {type(block): block for block in blocks}


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
    assert [entry.text for entry in row] == [
        "local",
        f"{np.mean(every):.2f}",
        f"{np.mean(held):.2f}",
        f"{negative} of 4",
    ]
    assert 0 < negative < 4
    assert (tmp_path / "report_norms.png").stat().st_size > 10_000


def test_shares_and_relative_norms_are_drawn(counts):
    norms = np.array([[1.0, 2.0, 1.0], [3.0, 3.0, 6.0]])
    shown = Norms("a", [4, 7], np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]), norms, ["a", "b", "c"])
    # by hand: ranks of the shares (2.5, 2.5, 1) and (3, 1.5, 1.5), of the norms (1.5, 3, 1.5) twice
    assert shown.correlations() == pytest.approx([0.5, -0.5])
    assert shown.picked() == [1, 0]


def test_the_picked_clients_are_lowest_median_and_highest():
    """Norms in the order of the shares for client 3 alone, then more and more of them swapped."""
    shares = np.tile(np.arange(1.0, 6.0), (5, 1))
    norms = np.array(
        [[2, 1, 3, 4, 5], [5, 4, 3, 2, 1], [3, 2, 1, 4, 5], [1, 2, 3, 4, 5], [4, 5, 3, 2, 1]]
    )
    shown = Norms("a", range(5), shares, norms.astype(float), list("abcde"))
    # by hand, 1 - 6 sum d^2 / (5 * 24): 0.9, -1, 0.6, 1, -0.9
    assert shown.correlations() == pytest.approx([0.9, -1, 0.6, 1, -0.9])
    assert shown.picked() == [1, 2, 3]


def test_equal_shares_have_no_correlation_and_are_drawn(write, tmp_path):
    run, _ = write()
    equal = np.full((CLIENTS, CLASSES), 3)
    found = blocks_of([run], counted([run], equal), tmp_path)
    assert [entry.text for entry in found[Table].rows[0][1:]] == ["-", "-", "0 of 0"]
    assert "client 0" in found[Gallery].drawings[1].svg


def test_a_hundred_classes_are_thinned_and_numbered(write, tmp_path):
    run, _ = write(classes=100)
    counts = np.tile(np.arange(100), (CLIENTS, 1))
    gallery = blocks_of([run], counted([run], counts), tmp_path)[Gallery]
    circles = gallery.drawings[1].svg
    assert "name" not in circles
    for label in (99, 88, 55, 0):  # every eleventh, from the largest share down
        assert f">{label}<" in circles
    assert "Of many classes 10 are drawn" in gallery.caption


def test_runs_whose_clients_have_no_head_need_no_counting(write_run, tmp_path):
    def not_called():
        raise AssertionError

    layout = automatic_layout([read_run(write_run(), "a", 0)])
    assert weight_norms(layout, not_called, tmp_path / "report") == []


def test_without_counts_there_is_no_section_and_with_an_error_its_reason(write, tmp_path):
    run, _ = write()
    assert blocks_of([run], [], tmp_path) == {}
    missing = [dataclasses.replace(p, error="no data") for p in partitions_of([run])]
    found = blocks_of([run], missing, tmp_path)
    assert set(found) >= {Heading, Listing}
    assert found[Listing].items == ["local: no data"]
    assert Table not in found


def test_only_the_runs_own_partition_will_do(write, counts, tmp_path):
    """Another seed draws other shares."""
    run, _ = write(seed=3)
    other, _ = write(seed=4)
    partitions = counted([other], counts)
    assert partition_of(run, partitions) is None
    assert partition_of(other, partitions) is partitions[0]
    found = blocks_of([run], partitions, tmp_path)
    assert found[Listing].items == ["local: its partition is not counted"]


def test_the_partition_that_is_counted_is_that_of_a_run_with_heads(write, write_run):
    """Even where another method has a lower seed."""
    run, _ = write(seed=3)
    plain = read_run(write_run("fedavg", 0), "plain", 0)
    assert [p.settings["seed"] for p in partitions_of([plain, run])] == [3]


def test_without_matplotlib_the_table_comes(write, counts, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_plot", lambda: False)
    run, _ = write()
    assert set(blocks_of([run], counted([run], counts), tmp_path)) == {Heading, Table}


@pytest.mark.flower  # it draws pages
def test_the_page_is_made_again_from_its_data_file(write, counts, tmp_path):
    run, _ = write()
    data = ReportData([run], partitions=counted([run], counts))
    command.write_report(parse(to_text(data), "it"), tmp_path / "one", partitions=False)
    command.main([str(tmp_path / "one" / "report.json"), "--out", str(tmp_path / "two")])
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n).iterdir()} for n in ("one", "two"))
    assert one == two
    assert b"Weight norms and class shares" in one["report.html"]
    assert b"report_norms.png" in one["report.md"]
