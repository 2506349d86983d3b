"""Who holds which classes, from the runs' recipes."""

import dataclasses
import json

import numpy as np
import pytest

from conf import compose, config_yaml
from fedhet.report.class_counts import MOST_COUNTS, Counting, count, partitions_of
from fedhet.report.data_file import Partition
from fedhet.report.figures import partitions
from fedhet.report.run_data import read_run


@pytest.fixture
def runs(tmp_path):
    """Real recipes: two seeds of FedAvg at two alphas, and one of another model."""

    def read(number, *words):
        folder = tmp_path / str(number)
        folder.mkdir()
        recipe = compose({"overrides": json.dumps(list(words))})
        (folder / "config.yaml").write_text(config_yaml(recipe, classifier_tensors=1))
        return read_run(folder, folder.name, 0)

    return [
        read(0, "seed=1", "partition.alpha=0.1"),
        read(1, "seed=0", "partition.alpha=0.1"),
        read(2, "seed=0", "partition.alpha=1"),
        read(3, "seed=0", "partition.alpha=1", "task.model=fedavg_cnn", "strategy=scaffold"),
    ]


def test_one_partition_a_recipe_that_of_the_lowest_seed(runs):
    assert [found.title for found in partitions_of(runs)] == [
        "digits, dirichlet: clients=10 alpha=0.1 min_size=10 seed=0",
        "digits, dirichlet: clients=10 alpha=1 min_size=10 seed=0",
    ]


def test_the_counts_are_those_of_the_run(runs):
    from tasks import build_task

    found = count(partitions_of(runs)[0].settings)
    recipe = compose({"overrides": json.dumps(["seed=0", "partition.alpha=0.1"])})
    task = build_task(dict(recipe.task), dict(recipe.partition), seed=0, num_clients=10)
    assert found["counts"] == task.class_counts().tolist()
    assert np.sum(found["counts"]) == 1437
    assert found["class_names"] == [str(label) for label in range(10)]


def test_what_cannot_be_counted_is_said(runs):
    settings = dict(partitions_of(runs)[0].settings)
    assert "data of its own" in count({**settings, "partition.name": "site"})["error"]
    assert "task.path" in count({**settings, "task.source": "files"})["error"]
    missing = [dataclasses.replace(p, error="no data") for p in partitions_of(runs)]
    listed = partitions(missing, None)[-1]
    assert listed.items[0].endswith("seed=0: no data")


def test_known_partitions_are_not_counted_again(runs):
    known = [dataclasses.replace(p, class_names=["a"], counts=[[1]]) for p in partitions_of(runs)]
    assert Counting(known, runs).result() == known


def test_runs_without_a_recipe_have_no_partition(tmp_path):
    assert partitions_of([read_run(tmp_path, "empty", 0)]) == []


def test_many_clients_are_drawn_and_cut(tmp_path):
    counts = np.random.default_rng(0).poisson(2, (200, 100))
    assert counts.size == MOST_COUNTS
    names = [f"class {label}" for label in range(100)]
    big = Partition("many", {}, names, counts.tolist(), clients=500)
    _, gallery = partitions([big], tmp_path / "report")
    assert "The first 200 of 500 clients." in gallery.caption
    assert gallery.drawings[0].svg.startswith("<svg viewBox")
    assert (tmp_path / "report_partition_1.png").stat().st_size > 10_000


@pytest.mark.flower
def test_the_counting_process_answers(runs):
    one, other = Counting([], runs).result()
    assert np.sum(one.counts) == np.sum(other.counts) == 1437
    assert one.error == ""
