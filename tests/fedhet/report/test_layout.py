"""Rows and columns that follow from the runs' settings."""

import json
from itertools import product

import pytest

from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.layout import automatic_layout, differing_settings
from fedhet.report.page import sections_of
from fedhet.report.sources import read_sources


def shape(layout):
    """Return {row: [seeds of each cell]}."""
    return {row: [[r.seed for r in c.runs] for c in cells] for row, cells in layout.rows.items()}


def test_rows_are_methods_and_columns_the_keys_that_vary(finished_run):
    every = product(("fedavg", "scaffold"), (0, 1), (1.0, 0.1))
    runs = [finished_run(method, seed, partition__alpha=alpha) for method, seed, alpha in every]
    layout = automatic_layout(runs)
    assert layout.columns == ("alpha 0.1", "alpha 1")
    assert shape(layout) == {"FedAvg": [[0, 1], [0, 1]], "SCAFFOLD": [[0, 1], [0, 1]]}
    assert layout.notes == ()


def test_a_key_that_an_older_run_lacks_makes_no_row_of_its_own(finished_run):
    """Its newer copy tells the same apart as one that all have."""
    old, new = "strategy__projections__form", "strategy__aggregator__form"
    runs = [finished_run("maecho", 0, **{old: "ridge"})]
    runs += [finished_run("maecho", 1, **{old: form, new: form}) for form in ("ridge", "damped")]
    found = shape(automatic_layout(runs))
    assert found == {"MA-Echo, form damped": [[1]], "MA-Echo, form ridge": [[0, 1]]}


def test_what_is_switched_off_is_another_experiment_than_what_is_switched_on(finished_run):
    """A group that is off is null, and that has no key in common with one that is on."""
    sampler = "strategy__server_sides__differential_privacy__sampler_seed"
    private = "strategy__server_sides__differential_privacy___target_"
    on = {"attack___target_": "attacks.SignFlip", "attack__factor": -1.0}
    runs = [finished_run("fedavg", seed, attack=None) for seed in (0, 1)]
    runs += [finished_run("fedavg", seed, **on) for seed in (0, 1)]
    assert automatic_layout(runs).columns == ("attack none", "attack SignFlip")
    assert shape(automatic_layout(runs)) == {"FedAvg": [[0, 1], [0, 1]]}
    noisy = [
        finished_run("fedavg", seed, attack=None, **{private: "dp.Noise", sampler: seed})
        for seed in (0, 1)
    ]
    assert shape(automatic_layout([*runs[:2], *noisy])) == {
        "FedAvg, differential_privacy none": [[0, 1]],
        "FedAvg, differential_privacy Noise": [[0, 1]],
    }


def test_seeds_folders_and_keys_of_the_site_are_no_difference(finished_run):
    runs = [
        finished_run("fedavg", seed, local__reuse_training=f"/s{seed}", device=f"cuda:{seed}")
        for seed in (0, 10, 2)
    ]
    layout = automatic_layout([*runs, finished_run("fedadam", 0, server__lr=0.03)])
    assert layout.columns == ("all runs",)
    assert shape(layout) == {"FedAvg": [[0, 2, 10]], "FedAdam": [[0]]}
    assert layout.notes == ()
    assert differing_settings(layout) == ["server.lr"]
    swept = [finished_run("fedavg", 0, partition__seed=seed) for seed in (1, 2)]
    assert automatic_layout(swept).columns == ("partition.seed 1", "partition.seed 2")


def test_a_key_of_the_method_makes_rows_and_is_not_averaged_over(finished_run):
    key = "strategy__fedprox__mu"
    runs = [finished_run("fedprox", seed, **{key: mu}) for mu in (0.1, 0.01) for seed in (0, 1)]
    layout = automatic_layout([finished_run("fedavg", 0), *runs])
    rows = {"FedProx, mu 0.01": [[0, 1]], "FedProx, mu 0.1": [[0, 1]]}
    assert shape(layout) == {"FedAvg": [[0]], **rows}
    assert "strategy.fedprox.mu" in layout.notes[0]


def test_labels_have_the_shortest_key_that_was_typed_and_not_what_follows_from_it(finished_run):
    mnist = {"task__name": "mnist", "task__mean": [0.13], "task__model": "fedavg_cnn"}
    other = finished_run("fedavg", 0, **mnist)
    assert automatic_layout([finished_run("fedavg", 0), other]).columns == ("digits", "mnist")
    rates = [(lr, rate) for lr in (1.0, 0.1) for rate in (0.1, 0.5)]
    runs = [finished_run("fedavg", 0, server__lr=lr, local__lr=rate) for lr, rate in rates]
    assert automatic_layout(runs).columns[0] == "local.lr 0.1, server.lr 0.1"
    key, copy = "strategy__fedpvr__layers", "strategy__client_sides__fedpvr__layers"
    both = [{key: layers, copy: layers} for layers in ("none", "last:2")]
    layout = automatic_layout([finished_run("fedpvr", 0, **settings) for settings in both])
    assert list(layout.rows) == ["FedPVR, layers none", "FedPVR, layers last:2"]
    assert "differ in strategy.fedpvr.layers." in layout.notes[0]


@pytest.mark.parametrize(
    ("varied", "title"),
    [
        ({"partition__name": ("iid", "pathological")}, "Methods by partition"),
        ({"task__model": ("mlp", "resnet8")}, "Methods by model"),
        (
            {"task__name": ("digits", "mnist"), "local__optimizer": ("sgd", "adam")},
            "Methods by task, optimizer",
        ),
        ({"local__lr": (0.1, 0.2), "server__lr": (1, 2)}, "Methods by local.lr, server.lr"),
    ],
)
def test_a_section_is_named_by_the_keys_of_its_columns(finished_run, varied, title):
    every = product(*varied.values())
    runs = [finished_run(**dict(zip(varied, values, strict=True))) for values in every]
    (section,) = sections_of(ReportData(runs))
    assert section.title == title


def test_columns_are_what_the_sweep_has_varied_and_not_what_follows_from_it(write_run, tmp_path):
    """Two tasks differ in model and size as well; the noise that one task needs is no column."""
    jobs = []
    for task, model, seed in product(("mnist", "digits"), ("mlp",), (0, 1)):
        size = {"task__train_size": 10, "local__lr": 0.2} if task == "digits" else {}
        folder = write_run("fedavg", seed, task__name=task, task__model=model, **size)
        jobs.append({"folder": folder.name, "status": "completed"})
    index = {"overrides": ["task=mnist,digits"], "began": "2026-11-28", "status": "completed"}
    index |= {"varied": ["task", "seed"], "jobs": jobs}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(index))
    data = read_sources([tmp_path / "sweep"])
    assert data.origins[0].varied == ["task", "seed"]
    (section,) = sections_of(parse(to_text(data), "report.json"))
    assert section.layout.columns == ("digits", "mnist")
    assert shape(section.layout) == {"FedAvg": [[0, 1], [0, 1]]}


def test_a_search_over_many_values_makes_rows(finished_run):
    rates = [round(0.01 * n, 2) for n in range(1, 14)]
    layout = automatic_layout([finished_run("fedavg", 0, local__lr=rate) for rate in rates])
    assert layout.columns == ("all runs",)
    assert list(layout.rows)[:2] == ["FedAvg, lr 0.01", "FedAvg, lr 0.02"]
    assert len(layout.rows) == 13


def test_by_chooses_the_columns_and_the_rest_becomes_rows(finished_run):
    every = product((5, 10), (0.1, 0.5))
    runs = [finished_run("fedavg", 0, clients=n, partition__alpha=alpha) for n, alpha in every]
    assert automatic_layout(runs).columns == tuple(
        f"alpha {alpha}, clients {clients}" for alpha in (0.1, 0.5) for clients in (5, 10)
    )
    layout = automatic_layout(runs, by=["clients"])
    assert layout.columns == ("clients 5", "clients 10")
    assert shape(layout) == {"FedAvg, alpha 0.1": [[0], [0]], "FedAvg, alpha 0.5": [[0], [0]]}


def test_a_repeated_seed_counts_once_and_failed_runs_are_in_no_mean(finished_run):
    first, second = finished_run("fedavg", 0), finished_run("fedavg", 0)
    failed = {"summary": {"status": "failed"}}
    others = finished_run("fedavg", 1, **failed), finished_run("scaffold", 1, **failed)
    layout = automatic_layout([first, second, *others])
    assert layout.cells[0].runs == (second,)
    assert f"{first.name} is left out" in layout.notes[0]
    assert shape(layout) == {"FedAvg": [[0]], "SCAFFOLD": [[]]}
    assert layout.cells[1].others == (others[1],)
