"""Rows and columns that follow from the runs' settings."""

import pytest

from fedhet.report.layout import automatic_layout, differing_settings
from fedhet.report.run_data import read_run


@pytest.fixture
def read(write_run):
    def write_and_read(*words, **settings):
        folder = write_run(*words, **settings)
        return read_run(folder, folder.name, 0)

    return write_and_read


def shape(layout):
    """Return {row: [seeds of each cell]}."""
    return {line.label: [[r.seed for r in c.runs] for c in line.cells] for line in layout.lines}


def test_rows_are_methods_and_columns_the_keys_that_vary(read):
    runs = [
        read(method, seed, partition__alpha=alpha)
        for method in ("fedavg", "scaffold")
        for seed in (0, 1)
        for alpha in (1.0, 0.1)
    ]
    layout = automatic_layout(runs)
    assert layout.columns == ("alpha 0.1", "alpha 1")
    assert shape(layout) == {"fedavg": [[0, 1], [0, 1]], "scaffold": [[0, 1], [0, 1]]}
    assert layout.notes == ()


def test_one_column_where_only_method_and_seed_vary(read):
    layout = automatic_layout([read("fedavg", 0), read("fedavg", 10), read("fedavg", 2)])
    assert layout.columns == ("all runs",)
    assert shape(layout) == {"fedavg": [[0, 2, 10]]}


def test_what_a_method_sets_itself_makes_no_column_and_is_said(read):
    runs = [read("fedavg", 0), read("fedadam", 0, server__lr=0.03)]
    layout = automatic_layout(runs)
    assert layout.columns == ("all runs",)
    assert differing_settings(layout) == ["server.lr"]


def test_a_key_that_an_older_run_lacks_makes_no_row_of_its_own(read):
    """Its newer copy tells the same apart as one that all have."""
    old, new = "strategy__projections__form", "strategy__aggregator__form"
    runs = [read("maecho", 0, **{old: "ridge"})]
    runs += [read("maecho", 1, **{old: form, new: form}) for form in ("ridge", "damped")]
    assert shape(automatic_layout(runs)) == {
        "maecho, form damped": [[1]],
        "maecho, form ridge": [[0, 1]],
    }


def test_folders_of_data_and_of_trained_models_are_no_settings(read):
    runs = [
        read("fedavg", seed, local__trained_by=reuse_training, task__path=f"/srv/{seed}")
        for seed, reuse_training in ((0, None), (1, "/runs/base_s1"), (2, "/runs/base_s2"))
    ]
    layout = automatic_layout(runs)
    assert layout.columns == ("all runs",)
    assert shape(layout) == {"fedavg": [[0, 1, 2]]}
    assert differing_settings(layout) == []


def test_a_key_of_the_method_makes_rows_and_is_not_averaged_over(read):
    key = "strategy__fedprox__mu"
    runs = [read("fedprox", seed, **{key: mu}) for mu in (0.1, 0.01) for seed in (0, 1)]
    layout = automatic_layout([read("fedavg", 0), *runs])
    assert shape(layout) == {
        "fedavg": [[0]],
        "fedprox, mu 0.01": [[0, 1]],
        "fedprox, mu 0.1": [[0, 1]],
    }
    assert "strategy.fedprox.mu" in layout.notes[0]


def test_keys_that_follow_from_others_are_left_out_of_the_label(read):
    runs = [
        read("fedavg", 0),
        read("fedavg", 0, task__name="mnist", task__mean=[0.13], task__model="fedavg_cnn"),
    ]
    assert automatic_layout(runs).columns == ("digits", "mnist")


def test_the_key_that_was_typed_names_the_rows_not_those_that_refer_to_it(read):
    runs = [
        read(
            "fedpvr",
            0,
            strategy__fedpvr__layers=layers,
            strategy__client_sides__fedpvr__layers=layers,
        )
        for layers in ("none", "last:2")
    ]
    layout = automatic_layout(runs)
    assert [line.label for line in layout.lines] == ["fedpvr, layers last:2", "fedpvr, layers none"]
    assert "differ in strategy.fedpvr.layers." in layout.notes[0]


def test_two_keys_make_a_column_each_combination(read):
    runs = [read("fedavg", 0, clients=n, partition__alpha=a) for n in (5, 10) for a in (0.1, 0.5)]
    assert automatic_layout(runs).columns == (
        "alpha 0.1, clients 5",
        "alpha 0.1, clients 10",
        "alpha 0.5, clients 5",
        "alpha 0.5, clients 10",
    )


def test_a_search_over_many_values_makes_rows(read):
    rates = [round(0.01 * n, 2) for n in range(1, 14)]
    layout = automatic_layout([read("fedavg", 0, local__lr=rate) for rate in rates])
    assert layout.columns == ("all runs",)
    assert [line.label for line in layout.lines][:2] == ["fedavg, lr 0.01", "fedavg, lr 0.02"]
    assert len(layout.lines) == 13


def test_keys_with_the_same_last_word_are_written_out(read):
    runs = [
        read("fedavg", 0, server__lr=lr, local__lr=rate) for lr in (1.0, 0.1) for rate in (0.1, 0.5)
    ]
    assert automatic_layout(runs).columns[0] == "local.lr 0.1, server.lr 0.1"


def test_by_chooses_the_columns_and_the_rest_becomes_rows(read):
    runs = [read("fedavg", 0, clients=n, partition__alpha=a) for n in (5, 10) for a in (0.1, 0.5)]
    layout = automatic_layout(runs, by=["clients"])
    assert layout.columns == ("clients 5", "clients 10")
    assert shape(layout) == {"fedavg, alpha 0.1": [[0], [0]], "fedavg, alpha 0.5": [[0], [0]]}


def test_seeds_in_other_places_and_keys_of_the_site_are_no_difference(read):
    runs = [
        read("fedavg", seed, partition__seed=7, runtime__name=name, device=name)
        for seed, name in enumerate(("cpu", "cuda"))
    ]
    layout = automatic_layout(runs)
    assert shape(layout) == {"fedavg": [[0, 1]]}
    assert layout.notes == ()


def test_a_swept_partition_seed_is_a_difference(read):
    runs = [read("fedavg", 0, partition__seed=seed) for seed in (1, 2)]
    assert automatic_layout(runs).columns == ("seed 1", "seed 2")


def test_the_same_seed_twice_counts_once(read):
    first, second = read("fedavg", 0), read("fedavg", 0)
    layout = automatic_layout([first, second])
    assert layout.lines[0].cells[0].runs == (second,)
    assert "Seed 0 was run twice" in layout.notes[0]
    assert first.name in layout.notes[0]


def test_failed_runs_keep_their_cell_but_are_in_no_mean(read):
    runs = [
        read("fedavg", 0),
        read("fedavg", 1, summary={"status": "failed"}),
        read("scaffold", 0, summary={"status": "failed"}),
    ]
    layout = automatic_layout(runs)
    assert shape(layout) == {"fedavg": [[0]], "scaffold": [[]]}
    assert layout.lines[1].cells[0].others == ("failed",)
