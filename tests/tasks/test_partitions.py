import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import Partitioner

from common.errors import ConfigError
from tasks.partitions import hold_out, partition_rows
from tasks.partitions.config import COMMON, FLAVOURS
from tasks.partitions.library import build_partitioner
from tests.tasks.drawing import config, draw, labels_of
from tests.tasks.generated import values

DRAWN = sorted(set(FLAVOURS) - {"site"})
# Every example goes to at most one client; in the others a class that has run out is used again.
DISJOINT = sorted(set(DRAWN) - {"class_prior_dirichlet", "pathological"})


# ---- all flavours --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISJOINT)
def test_no_example_goes_to_two_clients(name):
    rows = np.concatenate(draw(name))
    assert len(np.unique(rows)) == len(rows)
    assert rows.min() >= 0
    assert rows.max() < 3000


@pytest.mark.parametrize("name", ["iid", "dirichlet", "feddf_dirichlet", "shards"])
def test_every_example_goes_to_a_client(name):
    assert sorted(np.concatenate(draw(name))) == list(range(3000))


@pytest.mark.parametrize(
    "name", ["iid", "feddf_dirichlet", "class_prior_dirichlet", "pathological", "shards"]
)
def test_equal_sizes(name):
    assert [len(part) for part in draw(name, clients=12)] == [250] * 12


@pytest.mark.parametrize("name", ["feddf_dirichlet", "class_prior_dirichlet", "pathological"])
def test_equal_sizes_leave_a_remainder_out(name):
    rows = draw(name, clients=7)
    assert [len(part) for part in rows] == [3000 // 7] * 7


def test_iid_sizes_differ_by_one():
    assert sorted(len(part) for part in draw("iid", clients=7)) == [428] * 3 + [429] * 4


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.usefixtures("empty_cache")
def test_the_seed_decides(name, monkeypatch, tmp_path):
    first, other = draw(name, seed=1), draw(name, seed=2)
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "another"))  # drawn again
    again = draw(name, seed=1)
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


@pytest.mark.parametrize("name", DRAWN)
def test_the_partitions_own_seed_goes_before_the_runs(name):
    labels = labels_of(10, 300)
    groups = np.arange(3000) % 20
    of_run = draw(name, labels, groups=groups, seed=3)
    own = partition_rows(config(name, seed=3), labels, groups, num_clients=10, seed=99)
    assert all(map(np.array_equal, of_run, own))


@pytest.mark.parametrize("name", sorted(set(DRAWN) - {"natural"}))
def test_each_flavour_is_a_flower_partitioner(name):
    labels = labels_of(10, 60)
    partitioner = build_partitioner(config(name), 4, seed=0)
    assert isinstance(partitioner, Partitioner)
    partitioner.dataset = Dataset.from_dict({"label": labels, "row": np.arange(600)})
    assert partitioner.num_partitions == 4
    part = partitioner.load_partition(1)
    assert np.array_equal(labels[part["row"][:]], part["label"][:])


def test_partitions_are_cached(monkeypatch, empty_cache):
    labels = labels_of(4, 30)
    first = draw("iid", labels, seed=4)
    from tasks.partitions import library

    monkeypatch.setattr(library, "draw_rows", lambda *a: pytest.fail("drawn again"))
    assert all(map(np.array_equal, first, draw("iid", labels.copy(), seed=4)))
    monkeypatch.undo()
    monkeypatch.setenv("FEDHET_CACHE", str(empty_cache))
    other = draw("iid", labels[::-1].copy(), seed=4, clients=9)
    assert len(other) == 9


@pytest.mark.parametrize("name", sorted(FLAVOURS))
def test_recipes_have_the_flavours_keys_and_defaults(name):
    recipe = values("partition", name)
    assert set(recipe) == {*COMMON, *FLAVOURS[name]}
    assert {key: recipe[key] for key in FLAVOURS[name]} == FLAVOURS[name]


# ---- bad input -----------------------------------------------------------------------------------


def test_more_clients_than_examples_is_refused():
    with pytest.raises(ConfigError, match=r"clients=31 is more than the 30 training examples"):
        draw("iid", labels_of(3, 10), clients=31)
    with pytest.raises(ConfigError, match=r"clients=0 must be >= 1"):
        draw("iid", clients=0)


def test_seeds_that_no_generator_takes_are_refused_by_key():
    with pytest.raises(ConfigError, match=r"^seed=-1 must be in"):
        draw("dirichlet", seed=-1)
    fixed = config("dirichlet", seed=2**32)
    with pytest.raises(ConfigError, match=r"^partition\.seed=4294967296 must be in"):
        partition_rows(fixed, labels_of(2, 20), None, num_clients=2, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lda", {}, r"partition\.name='lda' is unknown; allowed: .*dirichlet.*shards"),
        ("dirichlet", {"alpha": 0}, r"partition\.alpha=0 must be > 0"),
        ("class_prior_dirichlet", {"alpha": -1.0}, r"partition\.alpha=-1\.0 must be > 0"),
        ("feddf_dirichlet", {"alpha": float("nan")}, r"partition\.alpha=nan"),
        ("pathological", {"classes": 0}, r"partition\.classes=0 must be a whole number"),
        (
            "iid",
            {"alpha": 1.0},
            r"unknown key partition\.alpha; partition has: holdout, name",
        ),
        ("iid", {"holdout": 1.0}, r"partition\.holdout=1\.0 must be in \[0, 1\)"),
        (
            "shards",
            {"shards_per_client": 0},
            r"partition\.shards_per_client=0 must be a whole number",
        ),
    ],
)
def test_bad_values_are_refused_by_key(name, options, message):
    with pytest.raises(ConfigError, match=message):
        config(name, **options)


def test_more_shards_than_examples_are_refused():
    with pytest.raises(ConfigError, match=r"clients=20 with partition\.shards_per_client=2 need"):
        draw("shards", labels_of(3, 10), clients=20, shards_per_client=2)


# ---- held-out examples ---------------------------------------------------------------------------


def test_held_out_rows_are_apart_from_the_others():
    rows = np.random.default_rng(0).permutation(100)
    kept, held_out = hold_out(rows, 0.2, seed=0, client_id=3)
    assert len(held_out) == 20
    assert sorted([*kept, *held_out]) == list(range(100))
    assert np.array_equal(hold_out(rows, 0.2, 0, 3)[1], held_out)
    assert not np.array_equal(hold_out(rows, 0.2, 1, 3)[1], held_out)
    assert not np.array_equal(hold_out(rows, 0.2, 0, 4)[1], held_out)


def test_a_row_held_twice_stays_on_one_side():
    rows = np.tile(np.arange(10), 3)
    kept, held_out = hold_out(rows, 0.3, seed=0, client_id=0)
    assert len(held_out) == 3
    assert not set(kept) & set(held_out)
    assert len(kept) == 21


def test_at_least_one_example_stays_for_training():
    assert [len(part) for part in hold_out(np.array([4]), 0.9, 0, 0)] == [1, 0]
    assert [len(part) for part in hold_out(np.array([4, 5]), 0.9, 0, 0)] == [1, 1]
