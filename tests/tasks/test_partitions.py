"""Partitions: invariants of all flavours, published sizes, moments of the draws, refusals."""

import numpy as np
import pytest
from datasets import Dataset

from fedhet.common.partition_settings import PARTITIONS
from fedhet.tasks.partitions import PartitionConfig, hold_out, library, partition_rows
from fedhet.tasks.partitions.dirichlet import ClassDirichletPartitioner
from tests.refused import refused
from tests.tasks.generated import make_task

DRAWN = sorted(set(PARTITIONS) - {"site"})
# Every example goes to at most one client; in the others a class that has run out is used again.
DISJOINT = sorted(set(DRAWN) - {"class_prior_dirichlet", "pathological"})
PUBLISHED_SIZES = [5199, 11370, 17651, 12665, 13115]


def config(name, **options):
    return PartitionConfig.from_mapping({"name": name, **options})


def labels_of(classes, each, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), each))


def draw(name, labels=None, *, clients=10, seed=0, groups=None, **options):
    labels = labels_of(10, 300) if labels is None else labels
    if name == "natural" and groups is None:
        groups = np.arange(len(labels)) * 7 % 20
    return partition_rows(config(name, **options), labels, groups, num_clients=clients, seed=seed)


def counts(labels, rows):
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in rows])


@pytest.mark.slow
def test_no_example_goes_to_two_clients_and_sizes_are_equal_where_they_should_be():
    for name in DISJOINT:
        rows = np.concatenate(draw(name))
        assert len(np.unique(rows)) == len(rows), name
        complete = name in ("iid", "dirichlet", "feddf_dirichlet", "shards")
        assert sorted(rows) == list(range(3000)) or not complete
    assert sorted(map(len, draw("iid", clients=7))) == [428] * 3 + [429] * 4
    for name in ("feddf_dirichlet", "class_prior_dirichlet", "pathological"):
        assert [len(part) for part in draw(name, clients=7)] == [428] * 7


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.usefixtures("empty_cache")
def test_the_seed_decides_and_the_partitions_own_seed_overrides_it(name, monkeypatch, tmp_path):
    first, other = draw(name, seed=1), draw(name, seed=2)
    monkeypatch.setenv("FEDHET_CACHE", str(tmp_path / "another"))  # drawn again
    groups = np.arange(3000) * 7 % 20
    own = partition_rows(config(name, seed=1), labels_of(10, 300), groups, num_clients=10, seed=9)
    assert all(map(np.array_equal, first, own))
    assert not all(map(np.array_equal, first, other))


@pytest.mark.slow
def test_partitions_are_cached(monkeypatch, empty_cache):
    labels = labels_of(4, 30)
    first = draw("iid", labels, seed=4)
    assert len(draw("iid", labels, seed=4, clients=9)) == 9
    other, own = (draw("shards", each.copy()) for each in (labels, labels[::-1]))
    assert not all(map(np.array_equal, other, own))
    monkeypatch.setattr(library, "draw_rows", lambda *a: pytest.fail("drawn again"))
    assert all(map(np.array_equal, first, draw("iid", labels.copy(), seed=4)))


def test_iid_draws_classes_in_proportion_from_a_sorted_data_set():
    labels = np.repeat(np.arange(10), 300)  # Flower's alone would give each client one class
    table = counts(labels, draw("iid", labels))
    spread = ((table - 30.0) ** 2 / 30).sum()  # about chi-squared with 81 degrees of freedom
    assert 30 < spread < 150


def test_dirichlet_reproduces_the_published_partition_of_mnist():
    labels = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
    rows = draw("dirichlet", labels, clients=5, seed=1, alpha=0.01)
    assert [len(part) for part in rows] == PUBLISHED_SIZES
    table = counts(labels, rows)
    assert table[0].tolist() == [0, 0, 0, 5199, 0, 0, 0, 0, 0, 0]
    assert table[4].tolist() == [0, 0, 0, 932, 0, 0, 5918, 6265, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_shares_and_priors_have_the_dirichlets_second_moment(alpha):
    """E sum p^2 = (alpha + 1) / (K alpha + 1) for K = 10 clients, or classes."""
    expected = pytest.approx((alpha + 1) / (10 * alpha + 1), rel=0.06)
    labels = labels_of(400, 200)
    table = counts(labels, draw("dirichlet", labels, alpha=alpha, balance=False))
    assert ((table * (table - 1.0)).sum(axis=0) / (200 * 199)).mean() == expected
    labels = labels_of(10, 3000)
    table = counts(labels, draw("class_prior_dirichlet", labels, clients=300, alpha=alpha))
    assert ((table * (table - 1.0)).sum(axis=1) / (100 * 99)).mean() == expected


def test_dirichlet_meets_its_minimum_size_or_says_what_to_change(monkeypatch):
    for seed in range(3):
        assert min(map(len, draw("dirichlet", seed=seed, alpha=0.05, min_size=60))) >= 60
    monkeypatch.setattr("fedhet.tasks.partitions.dirichlet.MAX_DRAWS", 50)
    with refused("partition.min_size=301", "clients=10", "3010"):
        draw("dirichlet", min_size=301)
    wanted = "50 partition.min_size=10 partition.alpha=0.001 clients=40"
    with refused(*wanted.split()):
        draw("dirichlet", labels_of(4, 100), clients=40, alpha=0.001)


def test_a_class_without_any_client_is_drawn_again_and_not_lost():
    # with so small an alpha every gamma variate can be 0, and the shares NaN
    partitioner = ClassDirichletPartitioner(3, 1e-3, min_size=1, seed=0)
    partitioner.dataset = Dataset.from_dict({"label": labels_of(30, 10)})
    assert sorted(np.concatenate(partitioner.rows())) == list(range(300))
    assert len(partitioner.load_partition(1)) == len(partitioner.rows()[1])  # Flower's interface
    assert partitioner.num_partitions == 3


@pytest.mark.slow
def test_feddf_draws_for_groups_of_ten_with_few_classes_at_small_alpha(monkeypatch):
    labels = labels_of(10, 600)
    concentrated = counts(labels, draw("feddf_dirichlet", labels, alpha=0.05))
    assert np.median(concentrated.max(axis=1)) > 240
    # the re-cut shifts borders, so a client can miss some of its last classes even here
    even = counts(labels, draw("feddf_dirichlet", labels, alpha=1000))
    assert np.median((even > 0).sum(axis=1)) >= 9
    rows = draw("feddf_dirichlet", labels, clients=25, alpha=0.1)
    assert [len(part) for part in rows] == [240] * 25
    assert len(np.unique(np.concatenate(rows))) == 6000
    monkeypatch.setattr("fedhet.tasks.partitions.dirichlet.MAX_DRAWS", 50)
    with refused("partition.alpha=0.01", "clients=60", "group_size"):
        draw("feddf_dirichlet", labels_of(10, 60), clients=60, alpha=0.01, group_size=100)


def test_of_pathological_clients_an_exhausted_class_is_used_again_each_example_in_turn():
    labels = np.repeat([0, 1], [10, 990])
    rows = np.concatenate(draw("pathological", labels, clients=5, classes=2))
    times = np.bincount(rows, minlength=1000)
    assert times[:10].min() >= 40  # about 500 of 1000 draws for 10 examples
    assert times[:10].max() - times[:10].min() <= 1
    assert times[10:].max() == 1


@pytest.mark.slow
@pytest.mark.parametrize("classes", [1, 3])
def test_pathological_clients_have_that_many_classes_in_equal_parts(classes):
    labels = labels_of(10, 3000)
    table = counts(labels, draw("pathological", labels, clients=100, classes=classes))
    assert ((table > 0).sum(axis=1) == classes).all()
    assert table[table > 0].std() <= 1.3 * (300 * (1 / classes) * (1 - 1 / classes)) ** 0.5
    holders = (table > 0).sum(axis=0)  # binomial: 100 clients, classes / 10
    assert abs(holders - 10 * classes).max() < 4.5 * (10 * classes) ** 0.5
    assert len(np.unique(table > 0, axis=0)) >= min(10, 40 * (classes - 1) + 8)
    # Flower's own uses no example twice
    labels = labels_of(10, 60)
    rows = draw("pathological", labels, clients=8, classes=classes, equal_sizes=False)
    table = counts(labels, rows)
    assert (table.sum(axis=0) <= 60).all()
    assert ((table > 0).sum(axis=1) == classes).all()


@pytest.mark.slow
@pytest.mark.parametrize("equal_sizes", [True, False])
def test_of_pathological_clients_the_mode_says_which_classes_are_their_own(equal_sizes):
    labels = labels_of(10, 60)

    def held(mode, seed):
        options = {"equal_sizes": equal_sizes, "class_assignment_mode": mode, "seed": seed}
        return counts(labels, draw("pathological", labels, classes=2, **options)) > 0

    own, following = np.eye(10, dtype=bool), np.roll(np.eye(10, dtype=bool), 1, axis=1)
    drawn = [held("first-deterministic", seed) for seed in range(4)]
    assert all(table[own].all() and (table.sum(axis=1) == 2).all() for table in drawn)
    assert len({table.tobytes() for table in drawn}) == 4
    assert np.array_equal(held("deterministic", 0), own | following)
    assert not all(held("random", seed).any(axis=0).all() for seed in range(4))


def test_shards_hold_one_class_each():
    labels = labels_of(10, 300)
    table = counts(labels, draw("shards", labels, clients=15, shards_per_client=2))
    assert set(table.flatten()) <= {0, 100, 200}
    assert (table.sum(axis=1) == 200).all()


def test_natural_clients_are_single_ids_with_enough_examples():
    groups = np.repeat(np.arange(6), [5, 50, 5, 50, 50, 5])
    given = {"labels": np.zeros(165, dtype=np.int64), "groups": groups, "min_size": 6}
    rows = draw("natural", **given, clients=3)
    assert sorted(groups[part].tolist() for part in rows) == [[1] * 50, [3] * 50, [4] * 50]
    with refused("clients=4", "3", "min_size=6"):
        draw("natural", **given, clients=4)
    with refused("task.client_column"):
        make_task("digits", "natural").client_data(0)


def test_disjoint_classes_go_to_their_clients_or_in_even_shares_without_sets():
    labels = labels_of(10, 30)
    sets = [[0, 1, 3, 4, 7], [2, 5, 6, 8]]
    rows = draw("disjoint_classes", labels, clients=2, sets=sets)
    for held, part in zip(sets, rows, strict=True):
        assert np.array_equal(part, np.flatnonzero(np.isin(labels, held)))
    table = counts(labels, draw("disjoint_classes", labels, clients=4))
    assert sorted((table > 0).sum(axis=1)) == [2, 2, 3, 3]
    assert ((table > 0).sum(axis=0) == 1).all()
    assert (table.sum(axis=0) == 30).all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("iid", {"clients": 3001}, "clients=3001 3000"),
        ("iid", {"clients": 0}, "clients=0"),
        ("dirichlet", {"seed": 2**32}, "partition.seed=4294967296"),
        ("lda", {}, "partition.name='lda"),
        ("pathological", {"classes": 11}, "11"),
        ("iid", {"alpha": 1.0}, "partition.alpha partition"),
        ("iid", {"holdout": 1.0}, "partition.holdout=1.0 [0 1"),
        ("shards", {"shards_per_client": 0}, "partition.shards_per_client=0"),
        ("shards", {"clients": 1501}, "clients=1501 partition.shards_per_client=2"),
        ("disjoint_classes", {"sets": [[0]]}, "partition.sets 1 clients=10"),
        ("disjoint_classes", {"clients": 2, "sets": [[0, 1], [1]]}, "[1]"),
        ("disjoint_classes", {"clients": 2, "sets": [[0], [10]]}, "1 [10]"),
        ("disjoint_classes", {"clients": 11}, "clients=11 10"),
    ],
)
def test_bad_values_are_refused_by_key(name, options, message):
    own = {key: value for key, value in options.items() if key != "clients"}
    clients = options.get("clients", 10)
    with refused(*message.split()):
        partition_rows(config(name, **own), labels_of(10, 300), None, num_clients=clients, seed=0)


def test_held_out_rows_are_apart_from_the_others_and_so_are_their_copies():
    rows = np.random.default_rng(0).permutation(100)
    kept, held_out = hold_out(rows, 0.2, seed=0, client_id=3)
    assert len(held_out) == 20
    assert sorted([*kept, *held_out]) == list(range(100))
    for seed, client, same in ((0, 3, True), (1, 3, False), (0, 4, False)):
        assert np.array_equal(hold_out(rows, 0.2, seed, client)[1], held_out) == same
    kept, held_out = hold_out(np.tile(np.arange(10), 3), 0.3, seed=0, client_id=0)
    assert (len(kept), len(held_out)) == (21, 3)
    assert not set(kept) & set(held_out)
    for count, share in ((1, 0.9), (2, 0.9), (2, 0.01)):
        assert [len(part) for part in hold_out(np.arange(count), share, 0, 0)] == [1, count - 1]
    assert len(hold_out(rows, 0.0, 0, 0)[1]) == 0
