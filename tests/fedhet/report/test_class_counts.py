"""Class counts of the clients, from the runs' recipes."""

import dataclasses
import json

import numpy as np
import pytest

from fedhet.conf import compose, config_yaml
from fedhet.report import class_counts
from fedhet.report.class_counts import MOST_COUNTS, count, partitions_of, start_counting
from fedhet.report.data_file import Partition
from fedhet.report.figures import partitions
from fedhet.report.run_data import read_run
from fedhet.tasks import build_task


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real recipes: two seeds of FedAvg at one alpha, and two models at another."""
    found = []
    for words in (
        ["seed=1", "partition.alpha=0.1"],
        ["seed=0", "partition.alpha=0.1"],
        ["seed=0", "partition.alpha=1"],
        ["seed=0", "partition.alpha=1", "task.model=fedavg_cnn", "strategy=scaffold"],
    ):
        folder = tmp_path_factory.mktemp("run")
        recipe = compose({"overrides": json.dumps(words)})
        (folder / "config.yaml").write_text(config_yaml(recipe, classifier_tensors=1))
        found.append(read_run(folder, folder.name, 0))
    return found


@pytest.mark.slow
def test_each_recipe_has_one_partition_of_its_lowest_seed_with_the_runs_counts(runs, monkeypatch):
    found = partitions_of(runs)
    assert [partition.title for partition in found] == [
        "digits, dirichlet: clients=10 alpha=0.1 min_size=10 seed=0",
        "digits, dirichlet: clients=10 alpha=1 min_size=10 seed=0",
    ]
    second, first = start_counting(found[1:], runs)()  # in a process
    assert second == found[1]  # known partitions are not counted again
    recipe = compose({"overrides": json.dumps(["seed=0", "partition.alpha=0.1"])})
    task = build_task(dict(recipe.task), dict(recipe.partition), seed=0, num_clients=10)
    assert first.counts == task.class_counts().tolist()
    assert np.sum(first.counts) == 1437
    assert first.class_names == list("0123456789")
    monkeypatch.setattr(class_counts, "TIMEOUT_SECONDS", 0.01)
    assert "counting failed: it took longer" in start_counting([], runs[:1])()[0].error


def test_a_partition_that_cannot_be_counted_has_the_reason(runs, tmp_path):
    settings = dict(partitions_of(runs)[0].settings)
    assert "data of its own" in count({**settings, "partition.name": "site"})["error"]
    assert "task.path" in count({**settings, "task.source": "files"})["error"]
    missing = [dataclasses.replace(p, error="no data") for p in partitions_of(runs)]
    assert partitions(missing, tmp_path)[-1].items[0].endswith("seed=0: no data")
    assert partitions_of([read_run(tmp_path, "empty", 0)]) == []


@pytest.mark.slow
def test_of_many_clients_the_first_are_drawn(tmp_path):
    names = [f"class {label}" for label in range(100)]
    counts = np.ones((MOST_COUNTS // 100, 100)).tolist()
    many = Partition("many", {"partition.seed": 0}, names, counts, clients=500)
    _, picture = partitions([many], tmp_path / "report")
    assert "The first 200 of 500 clients." in picture.caption
    assert picture.svg.startswith("<svg viewBox")
