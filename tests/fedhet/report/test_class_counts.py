"""Class counts of the clients, which a simulation writes and the report reads."""

import dataclasses
import json

import numpy as np
import pytest

from fedhet.common.results import BY_CLIENT, CLASS_COUNTS, read_counts
from fedhet.conf import compose, plain_part
from fedhet.report.data_file import ReportData
from fedhet.report.page import compared_title
from fedhet.report.partitions import (
    MOST_PARTITIONS,
    partition_blocks,
    partitions_of,
    with_partitions,
)
from fedhet.report.run_data import read_run
from fedhet.server_app.class_counts import store_class_counts
from fedhet.tasks import build_task


def stored(folder, *words):
    """Store the counts of a recipe as a run does; return its task."""
    recipe = compose({"overrides": json.dumps(words)})
    clients = int(recipe.clients)
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=0, num_clients=clients)
    store_class_counts(recipe, folder, task)
    return task


@pytest.mark.slow
def test_a_simulation_stores_what_its_clients_hold_and_a_deployment_nothing(tmp_path, caplog):
    task = stored(tmp_path, "partition.alpha=0.1", "runtime=local")
    found = read_counts(tmp_path)
    assert found["counts"] == task.class_counts().tolist()
    assert (np.sum(found["counts"]), found["clients"]) == (1437, 10)
    assert found["class_names"] == list("0123456789")
    assert "no client" not in caplog.text
    (tmp_path / CLASS_COUNTS).unlink()
    stored(tmp_path, "runtime=deployment")
    assert "has no class_counts.json" in read_counts(tmp_path)["error"]
    sets = "partition.sets=[[0,1,3,4,7],[2,5,6,8]]"
    stored(tmp_path, "partition=disjoint_classes", sets, "clients=2", "runtime=local")
    assert "no client has an example of class 9: " in caplog.text
    stored(tmp_path, "partition=disjoint_classes", "partition.sets=[[0],[1]]", "clients=2")
    assert "of class 2, 3, 4, 5, 6, 7, 8, 9: " in caplog.text


def test_tenths_of_a_regressions_targets_that_are_empty_are_no_classes(tmp_path, caplog):
    table = tmp_path / "t.csv"
    table.write_text("a,y\n" + "".join(f"{row},{row % 5 // 4 * row}\n" for row in range(200)))
    words = ("task=tabular", f"task.path={table}", "task.target=y", "task.kind=regression")
    stored(tmp_path, *words, "clients=2", "runtime=local")
    assert not np.array(read_counts(tmp_path)["counts"]).any(axis=0).all()
    assert "no client" not in caplog.text


def partitions(runs, *known):
    return with_partitions(ReportData(runs, partitions=known)).partitions


@pytest.mark.slow
def test_each_recipe_has_one_partition_of_its_lowest_seed(finished_run, tmp_path):
    counts = {"class_names": ["a", "b"], "counts": [[3, 0], [1, 4]], "clients": 500}
    runs = [
        finished_run("fedavg", seed, partition__alpha=alpha)
        for seed in (1, 0)
        for alpha in (0.1, 1)
    ]
    (runs[2].folder / CLASS_COUNTS).write_text(json.dumps(counts))
    (runs[3].folder / CLASS_COUNTS).write_text('{"class_names": ["a"], "counts": [[1, 2]]')
    first, second = partitions(runs)
    title = "digits, dirichlet: clients=10 alpha=0.1 seed=0"
    assert (first.title, first.counts, first.clients) == (title, counts["counts"], 500)
    assert "cannot be read" in second.error
    for damaged in ({**counts, "counts": 5}, {**counts, "counts": [[1]]}, [], {"counts": []}):
        (tmp_path / CLASS_COUNTS).write_text(json.dumps(damaged))
        assert "cannot be read" in read_counts(tmp_path)["error"]
    assert partitions(runs, first, second) == [first, second]  # known ones stay as they are
    others = {"lora__share_base": True, "loss": "focal", "head_init": "zeros"}
    same = [finished_run("flora", 0, **{f"task__{k}": v}) for k, v in others.items()]
    assert len(partitions(same)) == 1  # they differ in nothing that the partition is made by
    many = [finished_run("fedavg", 0, clients=number) for number in range(MOST_PARTITIONS + 1)]
    assert partitions(many)[-1].error == f"only the first {MOST_PARTITIONS} partitions are shown"
    blocks = partition_blocks([first, second], tmp_path / "report")
    (chart,) = (block for block in blocks if hasattr(block, "data"))
    assert chart.data["data"] == [[0, 0, 3, "a"], [1, 0, 1, "a"], [1, 1, 4, "b"]]
    assert "The first 2 of 500 clients." in chart.caption
    assert "Examples per client: 3 to 5, median 4." in chart.caption
    assert blocks[-1].items[0].startswith("digits, dirichlet: clients=10 alpha=1 seed=0: its class")
    assert partitions_of([dataclasses.replace(read_run(tmp_path, "empty", 0))]) == []


def test_a_run_whose_function_gives_each_client_its_data_has_no_partition(finished_run):
    """Its recipe has one all the same, which nothing reads."""
    own = finished_run(summary={"partition": BY_CLIENT}, partition__holdout=0.2)
    assert partitions_of([own]) == []
    assert {key for key in own.settings if "partition" in key} == {"partition.holdout"}
    assert compared_title([own]) == "FedAvg on digits, data by client"
    both = compared_title([finished_run(), own])
    assert both == "FedAvg on digits, dirichlet partition with alpha 0.1 and data by client"
