import os

import numpy as np
import pytest
from datasets import Dataset

from common.errors import ConfigError
from tasks.partitions.dirichlet import ClassDirichletPartitioner
from tests.tasks.drawing import counts, draw, labels_of
from tests.tasks.generated import make_task

MNIST_COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]

# ---- iid -----------------------------------------------------------------------------------------


def test_iid_draws_classes_in_proportion_from_a_sorted_data_set():
    labels = np.repeat(np.arange(10), 300)  # the library alone would give each client one class
    table = counts(labels, draw("iid", labels))
    spread = ((table - 30.0) ** 2 / 30).sum()  # about chi-squared with 81 degrees of freedom
    assert 30 < spread < 150


# ---- dirichlet -----------------------------------------------------------------------------------


def test_dirichlet_reproduces_the_published_partition_of_mnist():
    labels = np.repeat(np.arange(10), MNIST_COUNTS)
    rows = draw("dirichlet", labels, clients=5, seed=1, alpha=0.01)
    assert [len(part) for part in rows] == [5199, 11370, 17651, 12665, 13115]
    table = counts(labels, rows)
    assert table[0].tolist() == [0, 0, 0, 5199, 0, 0, 0, 0, 0, 0]
    assert table[4].tolist() == [0, 0, 0, 932, 0, 0, 5918, 6265, 0, 0]


@pytest.mark.skipif("FEDHET_DATA" not in os.environ, reason="FEDHET_DATA is not set: no MNIST here")
@pytest.mark.flower  # it reads 70,000 images: seconds
def test_dirichlet_reproduces_the_published_partition_on_the_real_mnist():
    task = make_task("mnist", "dirichlet", clients=5, options={"alpha": 0.01, "seed": 1})
    assert [len(part) for part in task.client_rows] == [5199, 11370, 17651, 12665, 13115]


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_dirichlet_shares_have_the_dirichlets_second_moment(alpha):
    clients, classes, each = 10, 400, 200
    labels = labels_of(classes, each)
    table = counts(labels, draw("dirichlet", labels, alpha=alpha, balance=False))
    concentration = (table * (table - 1.0)).sum(axis=0) / (each * (each - 1))
    expected = (alpha + 1) / (clients * alpha + 1)  # E sum p^2
    assert concentration.mean() == pytest.approx(expected, rel=0.06)


def test_balancing_keeps_sizes_closer():
    def largest(balance):
        draws = (draw("dirichlet", seed=s, alpha=0.1, balance=balance) for s in range(8))
        return np.mean([max(map(len, rows)) for rows in draws])

    assert largest(True) < 0.85 * largest(False)


def test_dirichlet_meets_its_minimum_size():
    for seed in range(5):
        assert min(map(len, draw("dirichlet", seed=seed, alpha=0.05, min_size=60))) >= 60


def test_dirichlet_says_what_to_change_when_the_minimum_cannot_be_had(monkeypatch):
    monkeypatch.setattr("tasks.partitions.dirichlet.MAX_DRAWS", 50)
    with pytest.raises(ConfigError, match=r"partition\.min_size=301 with clients=10 needs 3010"):
        draw("dirichlet", min_size=301)
    wanted = r"50 draws .* partition\.min_size=10 .* partition\.alpha=0\.001 and clients=40"
    with pytest.raises(ConfigError, match=wanted):
        draw("dirichlet", labels_of(4, 100), clients=40, alpha=0.001)


def test_a_class_without_any_taker_is_drawn_again_and_not_lost():
    # with so small an alpha every gamma variate can be 0, and the shares not numbers
    partitioner = ClassDirichletPartitioner(3, 1e-3, min_size=1, seed=0)
    labels = labels_of(30, 10)
    partitioner.dataset = Dataset.from_dict({"label": labels})
    assert sorted(np.concatenate(partitioner.rows())) == list(range(300))


# ---- FedDF's re-cut ------------------------------------------------------------------------------


def test_feddf_clients_have_few_classes_at_small_alpha_and_all_at_large():
    labels = labels_of(10, 600)
    concentrated = counts(labels, draw("feddf_dirichlet", labels, alpha=0.05)) / 600
    even = counts(labels, draw("feddf_dirichlet", labels, alpha=1000)) / 600
    assert np.median(concentrated.max(axis=1)) > 0.4
    # the re-cut shifts borders, so a client can miss some of its last classes even here
    assert np.median((even > 0).sum(axis=1)) >= 9


def test_feddf_draws_for_groups_of_ten():
    labels = labels_of(10, 600)
    rows = draw("feddf_dirichlet", labels, clients=25, alpha=0.1)
    assert [len(part) for part in rows] == [240] * 25
    assert len(np.unique(np.concatenate(rows))) == 6000


def test_feddf_without_groups_cannot_reach_half_a_share_for_many_clients(monkeypatch):
    monkeypatch.setattr("tasks.partitions.feddf.MAX_DRAWS", 200)
    with pytest.raises(ConfigError, match=r"partition\.alpha=0\.01 and clients=60 .*group_size"):
        draw("feddf_dirichlet", labels_of(10, 60), clients=60, alpha=0.01, group_size=100)


# ---- class priors --------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
def test_class_priors_have_the_dirichlets_second_moment(alpha):
    labels = labels_of(10, 3000)
    table = counts(labels, draw("class_prior_dirichlet", labels, clients=300, alpha=alpha))
    concentration = (table * (table - 1.0)).sum(axis=1) / (100 * 99)
    expected = (alpha + 1) / (10 * alpha + 1)
    assert concentration.mean() == pytest.approx(expected, rel=0.06)


def test_an_exhausted_class_is_used_again():
    labels = np.repeat([0, 1], [10, 990])
    rows = np.concatenate(draw("pathological", labels, clients=5, classes=2))
    times = np.bincount(rows, minlength=1000)
    assert times[:10].min() >= 40  # about 500 of 1000 draws for 10 examples, in turn
    assert times[:10].max() - times[:10].min() <= 1
    assert times[10:].max() == 1


def test_no_example_is_repeated_before_its_class_is_exhausted():
    labels = labels_of(10, 300)
    rows = np.concatenate(draw("class_prior_dirichlet", labels, alpha=0.1))
    times = np.bincount(rows, minlength=3000)
    for label in range(10):
        of_class = times[labels == label]
        assert of_class.max() - of_class.min() <= 1


@pytest.mark.parametrize("classes", [1, 3])
def test_pathological_clients_have_that_many_classes_in_equal_parts(classes):
    labels = labels_of(10, 3000)
    table = counts(labels, draw("pathological", labels, clients=100, classes=classes))
    assert ((table > 0).sum(axis=1) == classes).all()
    assert table[table > 0].std() <= 1.3 * (300 * (1 / classes) * (1 - 1 / classes)) ** 0.5
    holders = (table > 0).sum(axis=0)  # binomial: 100 clients, classes / 10
    assert abs(holders - 10 * classes).max() < 4.5 * (10 * classes) ** 0.5
    assert len(np.unique(table > 0, axis=0)) >= min(10, 40 * (classes - 1) + 8)


def test_pathological_of_the_library_uses_no_example_twice():
    rows = draw("pathological", equal_sizes=False)
    joined = np.concatenate(rows)
    assert len(np.unique(joined)) == len(joined)
    assert ((counts(labels_of(10, 300), rows) > 0).sum(axis=1) == 2).all()


@pytest.mark.parametrize("equal_sizes", [True, False])
def test_more_classes_than_there_are_is_refused(equal_sizes):
    with pytest.raises(ConfigError, match="11"):
        draw("pathological", classes=11, equal_sizes=equal_sizes)


# ---- shards and natural ids ----------------------------------------------------------------------


def test_shards_hold_one_class_each():
    labels = labels_of(10, 300)
    table = counts(labels, draw("shards", labels, clients=15, shards_per_client=2))
    assert set(table.flatten()) <= {0, 100, 200}
    assert ((table > 0).sum(axis=1) <= 2).all()


def test_natural_clients_are_single_ids():
    groups = labels_of(20, 150, seed=3)
    rows = draw("natural", groups=groups, clients=12)
    ids = [np.unique(groups[part]) for part in rows]
    assert [len(own) for own in ids] == [1] * 12
    assert len({int(own[0]) for own in ids}) == 12
    assert [len(part) for part in rows] == [150] * 12


def test_natural_ids_with_too_few_examples_are_not_chosen():
    groups = np.repeat(np.arange(6), [5, 50, 5, 50, 50, 5])
    labels = np.zeros(165, dtype=np.int64)
    rows = draw("natural", labels, groups=groups, clients=3, min_size=6)
    assert sorted(int(groups[part[0]]) for part in rows) == [1, 3, 4]
    with pytest.raises(ConfigError, match=r"clients=4 is more than the 3 natural ids .*min_size=6"):
        draw("natural", labels, groups=groups, clients=4, min_size=6)


def test_natural_needs_ids():
    with pytest.raises(ConfigError, match="femnist"):
        make_task("digits", "natural").client_data(0)


# ---- disjoint classes ----------------------------------------------------------------------------


def test_sets_of_classes_go_to_their_clients_and_what_is_in_none_is_left_out():
    labels = labels_of(10, 30)
    sets = [[0, 1, 3, 4, 7], [2, 5, 6, 8]]
    rows = draw("disjoint_classes", labels, clients=2, sets=sets)
    for held, part in zip(sets, rows, strict=True):
        assert np.array_equal(part, np.flatnonzero(np.isin(labels, held)))


def test_without_sets_every_class_is_with_one_client_and_the_shares_are_even():
    labels = labels_of(10, 30)
    table = counts(labels, draw("disjoint_classes", labels, clients=4))
    assert sorted((table > 0).sum(axis=1)) == [2, 2, 3, 3]
    assert ((table > 0).sum(axis=0) == 1).all()
    assert (table.sum(axis=0) == 30).all()


@pytest.mark.parametrize(
    ("clients", "sets", "message"),
    [
        (3, [[0], [1]], r"partition\.sets has 2 lists of classes and clients=3"),
        (2, [[0, 1], [1, 2]], r"partition\.sets names the classes \[1\] more than once"),
        (2, [[0], [10]], r"partition\.sets gives client 1 the classes \[10\]"),
        (11, None, r"clients=11 is more than the 10 classes"),
    ],
)
def test_sets_that_are_no_partition_are_refused(clients, sets, message):
    with pytest.raises(ConfigError, match=message):
        draw("disjoint_classes", clients=clients, sets=sets)
