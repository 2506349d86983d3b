"""What is read of a run's classifiers."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr

from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.run_data import read_run
from fedhet.report.sources import read_sources
from reproductions.feddw import classifier_data as classifiers
from reproductions.feddw.classifier_data import (
    MILLION,
    rank_correlation,
    read_head_norms,
    read_relations,
)
from strategies.feddw import class_relations
from tests.recipes import TINY, run_recipe
from tests.reproductions.classifier_files import (
    random_relations,
    write_own_heads,
    write_soft_labels,
    write_state,
)


def test_the_relations_are_those_of_the_last_checkpoint(write_run):
    folder = write_run()
    write_soft_labels(folder, *random_relations(0), after=9)
    labels, weight = random_relations(1)
    write_soft_labels(folder, labels, weight, after=10)
    found = read_relations(folder)
    head = class_relations(torch.from_numpy(weight).double()).numpy()
    np.testing.assert_allclose(np.array(found.soft_labels) / MILLION, labels, atol=6e-7)
    np.testing.assert_allclose(np.array(found.head) / MILLION, head, atol=6e-7)
    off = ~np.eye(10, dtype=bool)
    assert found.distance == pytest.approx(np.square(labels - head).mean(), rel=1e-3)
    assert found.rank_correlation == pytest.approx(
        spearmanr(labels[off], head[off]).statistic, abs=1e-4
    )


def test_equal_matrices_have_no_distance_and_the_same_ranks(write_run):
    folder = write_run()
    _, weight = random_relations(0)
    write_soft_labels(folder, class_relations(torch.from_numpy(weight)).numpy(), weight)
    found = read_relations(folder)
    assert found.distance < 1e-12
    assert found.rank_correlation == 1.0


def test_large_weights_do_not_overflow():
    weight = 100 * np.eye(3)
    np.testing.assert_allclose(classifiers.class_relations(weight), np.eye(3), atol=1e-12)


@pytest.mark.parametrize("classes", [2, 101])
def test_too_few_or_many_classes_have_no_relations(write_run, classes):
    folder = write_run()
    write_soft_labels(folder, *random_relations(0, classes))
    assert read_relations(folder) is None


def test_what_is_not_there_or_damaged_is_left_out(write_run):
    folder = write_run()
    assert (read_relations(folder), read_head_norms(folder)) == (None, None)
    write_own_heads(folder, {0: np.eye(3)})  # a checkpoint, but without soft labels
    assert read_relations(folder) is None
    labels, weight = random_relations(0)
    write_soft_labels(folder, labels, weight * np.nan)
    assert read_relations(folder) is None
    write_soft_labels(folder, labels, weight)
    assert read_relations(folder) is not None
    assert read_head_norms(folder) is None
    path = folder / "checkpoints" / "round-000003.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    assert (read_relations(folder), read_head_norms(folder)) == (None, None)


def test_norms_are_of_the_heads_that_the_server_has_taken(write_run):
    folder = write_run()
    write_own_heads(folder, {11: [[3, 4], [5, 12]], 2: [[8, 15], [0, 1]], 5: np.eye(2)})
    for other in ({"after": 4}, {"after": 3, "experiment": "e0"}):  # not committed; of another run
        write_state(folder, 2, {"personal/head.weight": np.eye(2)}, **other)
    write_state(folder, 5, {"personal/body.weight": np.eye(2)}, after=3)  # no head of its own
    found = read_head_norms(folder)
    assert found.clients == [2, 11]
    assert found.norms == [[17.0, 1.0], [5.0, 13.0]]


def test_of_very_many_clients_the_first_are_kept(write_run, monkeypatch):
    folder = write_run()
    write_own_heads(folder, {client: np.eye(3) for client in range(5)})
    monkeypatch.setattr(classifiers, "MOST_NORMS", 8)
    assert read_head_norms(folder).clients == [0, 1]


def test_ranks_of_equal_values_are_shared():
    one, other = np.array([0.0, 0.0, 0.3, 0.7, 0.3]), np.array([5.0, 2.0, 1.0, 1.0, 0.5])
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)
    assert rank_correlation(np.arange(4.0), -np.arange(4.0)) == pytest.approx(-1)
    assert rank_correlation(np.ones(3), np.arange(3.0)) is None
    assert rank_correlation(np.ones(1), np.ones(1)) is None


def test_a_failed_run_shows_no_classifiers(write_run):
    folder = write_run(summary={"status": "failed", "error": "no"})
    write_soft_labels(folder, *random_relations(0))
    assert read_run(folder, "a", 0).relations is None


def test_only_the_first_seeds_classifiers_are_kept(write_run, tmp_path):
    """They are large, and the page shows the first alone."""
    for mu in (0.0, 0.1):
        for seed in (2, 1, 0, 1):
            folder = write_run("feddw", seed, strategy__feddw__mu=mu)
            if seed > 0:
                write_soft_labels(folder, *random_relations(seed))
    write_own_heads(write_run("local", 4), {0: np.eye(2)})
    runs = read_sources([tmp_path / "sweep"]).runs
    # seed 0 has none; of seed 1 the later run counts, as in the table
    assert [run.relations is not None for run in runs] == [*(3 * [False] + [True]) * 2, False]
    assert [run.head_norms is not None for run in runs] == [*8 * [False], True]


def test_the_data_file_keeps_them_and_has_no_key_for_those_without(write_run):
    with_both, without = write_run("feddw"), write_run()
    write_own_heads(with_both, {1: np.eye(3), 3: 2 * np.eye(3)})
    write_soft_labels(with_both, *random_relations(0), after=2)
    runs = [read_run(folder, folder.name, 0) for folder in (with_both, without)]
    first, plain = parse(to_text(ReportData(runs)), "it").runs
    assert first.head_norms == runs[0].head_norms
    assert plain.relations is None
    text = to_text(ReportData(runs[1:]))
    assert "relations" not in text
    assert "head_norms" not in text


def test_a_hundred_classes_are_some_100_kb(write_run):
    folder = write_run("feddw")
    write_soft_labels(folder, *random_relations(0, 100))
    run = read_run(folder, "a", 0)
    assert parse(to_text(ReportData([run])), "it").runs[0].relations == run.relations
    assert len(to_text(ReportData([run]))) < 120_000


def test_a_real_run_has_soft_labels_where_they_are_looked_for(tmp_path):
    run_recipe(tmp_path / "a", *TINY, "rounds=1", "strategy=feddw")
    found = read_run(tmp_path / "a", "a", 0).relations
    np.testing.assert_allclose(np.sum(found.soft_labels, axis=1), MILLION, atol=20)
    weight = load_file(tmp_path / "a" / "model.safetensors")["head.weight"]
    head = class_relations(weight.double())
    np.testing.assert_allclose(np.array(found.head) / MILLION, head.numpy(), atol=6e-7)


def test_a_real_run_has_heads_where_they_are_looked_for(tmp_path):
    run_recipe(tmp_path / "a", *TINY, "rounds=1", "strategy=fedper")
    found = read_run(tmp_path / "a", "a", 0).head_norms
    assert found.clients == [0, 1, 2]
    for client, norms in zip(found.clients, found.norms, strict=True):
        (path,) = (tmp_path / "a").glob(f"client_state/*/client-{client:05d}/*.safetensors")
        expected = load_file(path)["personal/head.weight"].norm(dim=1)
        np.testing.assert_allclose(norms, expected.numpy(), rtol=1e-3)
