"""What FedDW's figures read of a run."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import spearmanr

from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.paper_figures import with_figures
from fedhet.report.sources import read_sources
from reproductions.feddw import classifier_data as classifiers
from reproductions.feddw import collect
from reproductions.feddw.classifier_data import (
    MILLION,
    head_norms_of,
    rank_correlation,
    read_head_norms,
    read_relations,
    relations_of,
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
    equal = class_relations(torch.from_numpy(weight)).numpy()
    write_soft_labels(folder, equal, weight, after=11)
    found = read_relations(folder)
    assert found.distance < 1e-12
    assert found.rank_correlation == pytest.approx(1.0)


def test_constant_values_have_no_rank_correlation():
    one, other = np.array([0.0, 0.0, 0.3, 0.7, 0.3]), np.array([5.0, 2.0, 1.0, 1.0, 0.5])
    assert rank_correlation(one, other) == pytest.approx(spearmanr(one, other).statistic)
    assert rank_correlation(np.ones(3), np.arange(3.0)) is None
    assert rank_correlation(np.ones(1), np.ones(1)) is None


def test_missing_and_damaged_files_and_too_few_or_many_classes_are_left_out(write_run):
    folder = write_run()
    assert collect(folder, {}, print) is None
    for classes in (2, 101):
        write_soft_labels(folder, *random_relations(0, classes))
        assert read_relations(folder) is None
    write_own_heads(folder, {0: np.eye(3)})  # a checkpoint without soft labels
    assert read_relations(folder) is None
    labels, weight = random_relations(0)
    write_soft_labels(folder, labels, weight * np.nan)
    assert read_relations(folder) is None
    write_soft_labels(folder, labels, weight)
    assert list(collect(folder, {}, print)) == ["relations"]
    path = folder / "checkpoints" / "round-000003.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    assert collect(folder, {}, print) is None


def test_norms_are_of_the_first_heads_that_the_server_has_taken(write_run, monkeypatch):
    folder = write_run()
    write_own_heads(folder, {11: [[3, 4], [5, 12]], 2: [[8, 15], [0, 1]], 5: np.eye(2)})
    for other in ({"after": 4}, {"after": 3, "experiment": "e0"}):  # not committed; of another run
        write_state(folder, 2, {"personal/head.weight": np.eye(2)}, **other)
    write_state(folder, 5, {"personal/body.weight": np.eye(2)}, after=3)  # no head of its own
    found = read_head_norms(folder)
    assert found.clients == [2, 11]
    assert found.norms == [[17.0, 1.0], [5.0, 13.0]]
    monkeypatch.setattr(classifiers, "MOST_NORMS", 3)
    assert read_head_norms(folder).clients == [2]


def test_the_first_seeds_figures_are_kept_and_go_through_the_data_file(write_run, tmp_path):
    for mu in (0.0, 0.1):
        for seed in (2, 1, 0, 1):
            folder = write_run("feddw", seed, strategy__feddw__mu=mu, paper={"name": "feddw"})
            if seed > 0:
                write_soft_labels(folder, *random_relations(seed))
    write_own_heads(write_run("local", 4, paper={"name": "feddw"}), {0: np.eye(2)})
    failed = write_run("feddw", 9, summary={"status": "failed"}, paper={"name": "feddw"})
    write_soft_labels(failed, *random_relations(0))
    runs = with_figures(read_sources([tmp_path / "sweep"]).runs, print)
    # seed 0 has none; of seed 1 the later run counts, as in the table
    kept = [*(3 * [False] + [True]) * 2, False, False]
    assert [relations_of(run) is not None for run in runs] == kept
    assert [head_norms_of(run) is not None for run in runs] == [*8 * [False], True, False]
    read = parse(to_text(ReportData(runs)), "it").runs
    assert [run.figures for run in read] == [run.figures for run in runs]
    assert relations_of(read[3]) == read_relations(runs[3].folder)


@pytest.mark.slow
def test_real_runs_have_soft_labels_and_heads_where_they_are_looked_for(tmp_path):
    run_recipe(tmp_path / "a", *TINY, "rounds=1", "strategy=feddw")
    found = read_relations(tmp_path / "a")
    np.testing.assert_allclose(np.sum(found.soft_labels, axis=1), MILLION, atol=20)
    weight = load_file(tmp_path / "a" / "model.safetensors")["head.weight"]
    head = class_relations(weight.double())
    np.testing.assert_allclose(np.array(found.head) / MILLION, head.numpy(), atol=6e-7)

    run_recipe(tmp_path / "b", *TINY, "rounds=1", "strategy=fedper")
    norms = read_head_norms(tmp_path / "b")
    assert norms.clients == [0, 1, 2]
    for client, rows in zip(norms.clients, norms.norms, strict=True):
        (path,) = (tmp_path / "b").glob(f"client_state/*/client-{client:05d}/*.safetensors")
        expected = load_file(path)["personal/head.weight"].norm(dim=1)
        np.testing.assert_allclose(rows, expected.numpy(), rtol=1e-3)
