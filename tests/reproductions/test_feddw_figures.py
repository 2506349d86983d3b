"""FedDW's Figures 4 and 8: weight norms by class share, soft labels beside class relations."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from scipy.special import softmax
from scipy.stats import spearmanr

from fedhet.report.blocks import Picture
from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.layout import automatic_layout
from fedhet.report.paper_figures import with_figures
from fedhet.report.partitions import partitions_of
from fedhet.reproductions.feddw import class_relations, classifier_data, collect
from fedhet.reproductions.feddw.classifier_data import MILLION, rank_correlation, read_relations
from fedhet.reproductions.feddw.classifier_data import read_head_norms as read_norms
from fedhet.reproductions.feddw.weight_norms import ClassifierNorms, norms_section
from tests.recipes import TINY, run_recipe
from tests.reproductions.blocks import by_type, texts_of

PAPER = {"name": "feddw"}
CLIENTS, CLASSES = 5, 10


def random_relations(seed, classes=CLASSES):
    """Return soft labels (C, C) whose rows sum to 1, and a classifier's weight (C, 6)."""
    generator = np.random.default_rng(seed)
    labels = generator.dirichlet(np.ones(classes), size=classes).astype(np.float32)
    return labels, generator.normal(0, 0.7, (classes, 6)).astype(np.float32)


def write_tensors(folder, tensors, after, **about):
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: np.asarray(value, dtype=np.float32) for name, value in tensors.items()}
    metadata = {"fedhet": json.dumps({"round": after, **about})}
    save_file(found, folder / f"round-{after:06d}.safetensors", metadata)


def write_soft_labels(folder, labels, weight, after=3):
    tensors = {"state/soft_labels/soft_labels/means": labels, "params/head.weight": weight}
    write_tensors(folder / "checkpoints", tensors, after)


def write_state(folder, client, tensors, after=3, experiment="e1"):
    """Add what a client keeps after a round."""
    write_tensors(folder / "client_state" / experiment / f"client-{client:05d}", tensors, after)


def write_own_heads(folder, heads):
    """Add clients' own heads (C, d), which the server has taken in the same round."""
    about = {"experiment": "e1", "committed": {str(client): 3 for client in heads}}
    write_tensors(folder / "checkpoints", {"params/body.weight": np.ones(2)}, 3, **about)
    for client, weight in heads.items():
        write_state(folder, client, {"personal/head.weight": weight})


def test_the_relations_are_those_of_the_last_checkpoint(write_run):
    folder = write_run()
    write_soft_labels(folder, *random_relations(0), after=9)
    labels, weight = random_relations(1)
    write_soft_labels(folder, labels, weight, after=10)
    found = read_relations(folder)
    head = softmax(weight.astype(float) @ weight.T, axis=1)
    np.testing.assert_allclose(np.array(found.soft_labels) / MILLION, labels, atol=6e-7)
    np.testing.assert_allclose(np.array(found.head) / MILLION, head, atol=6e-7)
    off = ~np.eye(10, dtype=bool)
    assert found.distance == pytest.approx(np.square(labels - head).mean(), rel=1e-3)
    ranks = spearmanr(labels[off], head[off]).statistic
    assert found.rank_correlation == pytest.approx(ranks, abs=1e-4)


def test_missing_and_damaged_files_and_too_few_or_many_classes_are_left_out(write_run):
    folder = write_run()
    assert collect(folder, {}, print) is None
    labels, weight = random_relations(0)
    for wrong in (random_relations(0, 2), random_relations(0, 101), (labels, weight * np.nan)):
        write_soft_labels(folder, *wrong)
        assert read_relations(folder) is None
    write_soft_labels(folder, labels, weight)
    assert list(collect(folder, {}, print)) == ["relations"]
    path = folder / "checkpoints" / "round-000003.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    assert collect(folder, {}, print) is None


def test_of_a_repeated_seed_the_later_run_counts_and_goes_through_the_data_file(finished_run):
    """As in the table; a failed run has no figures."""
    runs = []
    for seed, status in ((1, "completed"), (1, "completed"), (0, "failed")):
        runs.append(finished_run("feddw", seed, summary={"status": status}, paper=PAPER))
        write_soft_labels(runs[-1].folder, *random_relations(seed))
    found = with_figures(runs, [automatic_layout(runs)], print)
    assert [run.figures != {} for run in found] == [False, True, False]
    read = parse(to_text(ReportData(found)), "it").runs
    assert [run.figures for run in read] == [run.figures for run in found]
    assert classifier_data.relations_of(read[1]) == read_relations(runs[1].folder)


@pytest.mark.slow
def test_real_runs_have_soft_labels_and_heads_where_they_are_looked_for(tmp_path):
    run_recipe(tmp_path / "a", *TINY, "rounds=1", "strategy=feddw")
    found = read_relations(tmp_path / "a")
    np.testing.assert_allclose(np.sum(found.soft_labels, axis=1), MILLION, atol=20)
    weight = load_file(tmp_path / "a" / "model.safetensors")["head.weight"]
    head = softmax(weight.astype(float) @ weight.T, axis=1)
    np.testing.assert_allclose(np.array(found.head) / MILLION, head, atol=6e-7)
    run_recipe(tmp_path / "b", *TINY, "rounds=1", "strategy=fedper")
    norms = read_norms(tmp_path / "b")
    assert norms.clients == [0, 1, 2]
    for client, rows in zip(norms.clients, norms.norms, strict=True):
        (path,) = (tmp_path / "b").glob(f"client_state/*/client-{client:05d}/*.safetensors")
        head = load_file(path)["personal/head.weight"]
        np.testing.assert_allclose(rows, np.sqrt((head**2).sum(axis=1)), rtol=1e-3)


@pytest.mark.slow
def test_soft_labels_and_relations_are_side_by_side(finished_run, tmp_path):
    """Of FedAvg (mu = 0) and FedDW."""

    def found():
        layout = automatic_layout(with_figures(runs, [automatic_layout(runs)], print))
        return by_type(class_relations.relations_section(layout, [], tmp_path / "report"))

    runs = [finished_run("feddw", paper=PAPER, strategy__feddw__mu=mu) for mu in (0, 1)]
    assert found() == {}
    for number, run in enumerate(runs):
        write_soft_labels(run.folder, *random_relations(number, classes=5))
    picture, rows = found()[Picture], texts_of(found())
    assert (tmp_path / "report_relations.png").stat().st_size > 10_000
    assert "mu is 0 in FedDW, mu 0:" in picture.caption
    for mu, run in enumerate(runs):
        label, expected = f"FedDW, mu {mu}", read_relations(run.folder)
        assert rows[mu] == [label, f"{expected.distance:.3g}", f"{expected.rank_correlation:.2f}"]
        assert all(f"{kind} · {label}" in picture.svg for kind in ("SL", "CR"))


@pytest.fixture
def with_heads(finished_run):
    """Write a run whose clients have random heads (C, 4)."""

    def write_and_read(seed=0, classes=CLASSES):
        heads = np.random.default_rng(seed).normal(size=(CLIENTS, classes, 4))
        written = finished_run("local", seed, paper=PAPER)
        write_own_heads(written.folder, dict(enumerate(heads)))
        (run,) = with_figures([written], [automatic_layout([written])], print)
        return run, np.float32(heads)

    return write_and_read


def counted(run, counts):
    names = [f"name{label}" for label in range(counts.shape[1])]
    kept = {"class_names": names, "counts": counts.tolist()}
    return [dataclasses.replace(partition, **kept) for partition, _ in partitions_of([run])]


def norms_of(run, partitions, tmp_path):
    layout = automatic_layout([run])
    return by_type(norms_section(layout, partitions, tmp_path / "report"))


@pytest.mark.usefixtures("no_pictures")
def test_the_correlations_of_norms_and_shares_are_within_clients(with_heads, tmp_path):
    """With absent classes, and a client without examples."""
    run, heads = with_heads()
    shares = np.random.default_rng(0).dirichlet(np.full(CLASSES, 0.3), size=CLIENTS)
    counts, every, held = np.floor(200 * shares).astype(int), [], []
    counts[2] = 0
    for client in (0, 1, 3, 4):
        norms = np.sqrt((heads[client] ** 2).sum(axis=1))
        every.append(spearmanr(counts[client], norms).statistic)
        own = counts[client] > 0
        held.append(spearmanr(counts[client][own], norms[own]).statistic)
    negative = sum(value < 0 for value in every)
    assert 0 < negative < 4
    means = [f"{np.mean(every):.2f}", f"{np.mean(held):.2f}"]
    (row,) = texts_of(norms_of(run, counted(run, counts), tmp_path))
    assert row == ["Local", *means, f"{negative} of 4"]
    equal = np.full((CLIENTS, CLASSES), 3)
    assert texts_of(norms_of(run, counted(run, equal), tmp_path)) == [["Local", "-", "-", "0 of 0"]]
    assert rank_correlation(np.ones(1), np.ones(1)) is None  # nor has a single class


def test_the_picked_clients_have_the_lowest_median_and_highest_correlation():
    """Norms in the order of the shares for client 3 alone, then more and more of them swapped."""
    shares = np.tile(np.arange(1.0, 6.0), (5, 1))
    norms = np.array(
        [[2, 1, 3, 4, 5], [5, 4, 3, 2, 1], [3, 2, 1, 4, 5], [1, 2, 3, 4, 5], [4, 5, 3, 2, 1]]
    )
    shown = ClassifierNorms("a", range(5), shares, norms.astype(float), list("abcde"))
    # by hand, 1 - 6 sum d^2 / (5 * 24): 0.9, -1, 0.6, 1, -0.9
    assert shown.correlations() == pytest.approx([0.9, -1, 0.6, 1, -0.9])
    assert shown.picked() == [1, 2, 3]
