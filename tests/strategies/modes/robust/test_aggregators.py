"""Robust aggregators against brute force, closed forms, and Flower's own implementations."""

import itertools

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from scipy.optimize import minimize

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Reply
from fedhet.strategies.modes.robust.clipping import CenteredClipping, NormBound
from fedhet.strategies.modes.robust.coordinates import Median, TrimmedMean, squared_distances
from fedhet.strategies.modes.robust.fltrust import FLTrust
from fedhet.strategies.modes.robust.geometric_median import GeometricMedian
from fedhet.strategies.modes.robust.selection import Bulyan, Krum, MultiKrum, closest
from fedhet.strategies.round.reply_fold import Weights, sum_of

SHAPES = {"body.weight": (5, 3), "head.bias": (4,)}


def replies_of(vectors, payloads=None, buffers=None) -> list[Reply]:
    """Return replies with updates of SHAPES from vectors (n, 19), sent in another order."""
    found = []
    for i, vector in enumerate(np.asarray(vectors, dtype=np.float64)):
        body, head = torch.from_numpy(vector[:15]).reshape(5, 3), torch.from_numpy(vector[15:])
        own = {} if payloads is None else {"p": {"v": torch.as_tensor(payloads[i])}}
        held = {} if buffers is None else {"b": torch.as_tensor(buffers[i])}
        update = {"body.weight": body, "head.bias": head}
        found.append(Reply(i, 10 + i, 1, 0.1, update, payloads=own, buffers=held))
    return found


def combined(aggregator, replies, round=1):
    names = replies[0].payloads
    total = sum_of(replies, Weights("clients"), names)
    return aggregator.combine({}, total, replies, round)


def flat(update) -> np.ndarray:
    return torch.cat([update[name].flatten() for name in SHAPES]).numpy()


def drawn(count=9, seed=0, hostile=0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, 19))
    vectors[:hostile] = 40 + 5 * vectors[:hostile]
    return vectors


def by_flower(strategy, vectors) -> np.ndarray:
    """Return what a Flower strategy makes of these models, every client with one example."""
    messages = []
    for i, vector in enumerate(vectors):
        asked = Message(RecordDict(), dst_node_id=i + 1, message_type=MessageType.TRAIN)
        arrays = ArrayRecord({"x": torch.from_numpy(vector)})
        content = RecordDict({"arrays": arrays, "m": MetricRecord({"num-examples": 1})})
        messages.append(Message(content, reply_to=asked))
    arrays, _ = strategy.aggregate_train(1, messages)
    return arrays["x"].numpy()


def test_a_trimmed_mean_cuts_the_stated_share():
    """.29 * 100 is 28.999999999999996: of 29 zeros and 29 twos at the ends, none is left."""
    values = [0.0] * 29 + [0.5] * 42 + [2.0] * 29
    vectors = [{"x": torch.tensor([value])} for value in values]
    vectors[71] = {"x": torch.tensor([100.0])}
    found, *_ = TrimmedMean(trim=0.29).mean("update", vectors)
    assert torch.equal(found["x"], torch.tensor([0.5]))


FLOWER = {
    "median of an odd number": (Median(), flower.FedMedian(), drawn(7)),
    "median of an even number": (Median(), flower.FedMedian(), drawn(8)),
    "trimmed mean": (TrimmedMean(trim=0.25), flower.FedTrimmedAvg(beta=0.25), drawn(9)),
    "krum": (Krum(attackers=2), flower.Krum(num_malicious_nodes=2), drawn(9, hostile=2)),
    "multi-krum": (
        MultiKrum(attackers=2, select=4),
        flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4),
        drawn(9, hostile=2),
    ),
    # Flower's takes the clients of least score in one go: here it is given Krum's, one by one
    "bulyan": (
        Bulyan(attackers=2),
        flower.Bulyan(num_malicious_nodes=2, selection_rule=lambda all, f, size: krums(all, size)),
        drawn(11, hostile=2),
    ),
}


def krums(contents, size):
    vectors = [{"x": torch.from_numpy(one["arrays"]["x"].numpy())} for one in contents]
    chosen = Bulyan(attackers=2).choose(squared_distances(vectors))
    assert len(chosen) == size
    return [contents[i] for i in chosen]


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs", "vectors"), FLOWER.values(), ids=FLOWER)
def test_the_same_as_flowers(ours, theirs, vectors):
    found = flat(combined(ours, replies_of(vectors)).update)
    np.testing.assert_allclose(found, by_flower(theirs, vectors), rtol=1e-9, atol=1e-12)


def test_multi_krum_takes_all_but_the_attackers_and_two_by_default():
    """n = 7, f = 1: each one's sum of squares to its four nearest; 3, 6, 1 and 0 have the least.

    146, 111, 71, 86, 171 (of 10), 446.
    """
    places = np.array([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 100.0])
    aggregator = MultiKrum(attackers=1)
    found = flat(combined(aggregator, replies_of(np.outer(places, np.ones(19)))).update)
    np.testing.assert_allclose(found, (0 + 1 + 3 + 6) / 4)
    assert [client for client, trust in aggregator.trust.items() if trust] == [0, 1, 2, 3]


def test_bulyan_by_brute_force():
    vectors, f = drawn(8, seed=3), 1
    left, chosen = list(range(8)), []
    while len(chosen) < 8 - 2 * f:
        scores = []
        for i in left:
            lengths = sorted(((vectors[i] - vectors[j]) ** 2).sum() for j in left if j != i)
            scores.append(sum(lengths[: max(1, len(left) - f - 2)]))
        chosen.append(left.pop(int(np.argmin(scores))))
    expected = []
    for column in vectors[sorted(chosen)].T:
        middle = np.median(column)
        nearest = min(
            itertools.combinations(column, len(chosen) - 2 * f),
            key=lambda some: max(abs(one - middle) for one in some),
        )
        expected.append(np.mean(nearest))
    aggregator = Bulyan(attackers=f)
    np.testing.assert_allclose(flat(combined(aggregator, replies_of(vectors)).update), expected)
    assert aggregator.trust == {i: float(i in chosen) for i in range(8)}


def test_distances_are_symmetric_so_that_bulyans_last_picks_are_ties():
    """Of three clients that are left, two are closest to each other; scores have one neighbour."""
    for seed in range(300):
        vectors = drawn(11, seed=seed)
        distances = squared_distances([{"x": torch.from_numpy(one)} for one in vectors])
        assert torch.equal(distances, distances.T)
        left = [0, 4, 7]
        of_left = distances[left][:, left]
        first = closest(of_left, attackers=2)[0]
        nearest = min((0, 1), (0, 2), (1, 2), key=lambda pair: of_left[pair])
        assert first == nearest[0], "the lower number of the two"


def test_the_geometric_median_is_the_minimum():
    vectors = drawn(9, seed=1, hostile=3)
    found = flat(
        combined(GeometricMedian(iterations=1000, tolerance=0.0), replies_of(vectors)).update
    )

    def distance(point):
        return np.linalg.norm(vectors - point, axis=1).sum()

    best = minimize(distance, np.median(vectors, axis=0), tol=1e-12)
    assert distance(found) <= best.fun * (1 + 1e-9)
    # three points of an equilateral triangle: its centre, whatever a far point of no weight does
    triangle = np.zeros((3, 19))
    triangle[:, :2] = [[0, 0], [2, 0], [1, 3**0.5]]
    centre = flat(combined(GeometricMedian(), replies_of(triangle)).update)
    np.testing.assert_allclose(centre[:2], [1, 3**-0.5], rtol=1e-6)


def test_centred_clipping_by_hand_and_across_rounds():
    first = np.zeros((4, 19))
    first[:, 0] = [1, 1, 1, 100]
    aggregator = CenteredClipping(radius=2.0)
    # from 0: (1 + 1 + 1 + 2) / 4 = 1.25; then 1.25 + (3 * -0.25 + 2) / 4 = 1.5625
    moves = [flat(combined(aggregator, replies_of(first)).update)[0] for _ in range(2)]
    np.testing.assert_allclose(moves, [1.25, 1.5625])
    assert aggregator.trust[3] == pytest.approx(2 / 98.75)
    other = CenteredClipping(radius=2.0)
    other.load_state_dict(aggregator.state_dict())
    again = [flat(combined(one, replies_of(first)).update) for one in (aggregator, other)]
    np.testing.assert_array_equal(*again)
    # of buffers from 0 in every round, with the median distance: (3 * -.6 + 0) / 4
    held = [[-0.6], [-0.6], [-0.6], [0.0]]
    moves = [float(combined(other, replies_of(first, None, held)).buffers["b"]) for _ in range(2)]
    assert moves == pytest.approx([-0.45, -0.45])
    # without a radius: the median distance, (1 + 1 + 1 + 1) / 4
    free = flat(combined(CenteredClipping(), replies_of(first)).update)
    np.testing.assert_allclose(free[0], 1.0)


def test_the_norm_bound_by_hand_and_its_quantile():
    vectors = np.zeros((4, 19))
    vectors[:, 0] = [1, 2, 4, -100]
    fixed = NormBound(bound=2.0)
    assert flat(combined(fixed, replies_of(vectors)).update)[0] == pytest.approx(
        (1 + 2 + 2 - 2) / 4
    )
    assert fixed.trust == pytest.approx({0: 1, 1: 1, 2: 0.5, 3: 0.02})
    following, bound = NormBound(quantile=0.75, lr=0.5), np.quantile([1, 2, 4, 100], 0.75)
    for unclipped in (3, 3):  # C = 28 falls only where more than 3 of 4 are below
        combined(following, replies_of(vectors))
        bound *= np.exp(-0.5 * (unclipped / 4 - 0.75))
    assert following.bounds["update"] == pytest.approx(bound)
    following.bounds["update"] = 1.0
    combined(following, replies_of(vectors))  # one of four is not longer
    assert following.bounds["update"] == pytest.approx(np.exp(-0.5 * (0.25 - 0.75)))
    other = NormBound()
    other.load_state_dict(following.state_dict())
    assert other.bounds == following.bounds


def test_fltrust_by_hand():
    vectors = np.zeros((3, 19))
    vectors[0, 0], vectors[1, 1], vectors[2, 0] = 5, 7, -9
    vectors[1, 0] = 7
    aggregator = FLTrust()
    own = replies_of(np.eye(1, 19) * 2)[0].update
    aggregator.train = lambda model, round: own
    aggregator.bind(type("Model", (), {"model": None}))
    found = flat(combined(aggregator, replies_of(vectors)).update)
    cosine = 0.5**0.5  # of (7, 7); trusts 1, cosine, 0, all of length 2
    expected = (np.array([2, 0]) + cosine * 2 * np.array([cosine, cosine])) / (1 + cosine)
    np.testing.assert_allclose(found[:2], expected, rtol=1e-12)
    assert aggregator.trust == {0: 1, 1: 1, 2: 0}  # of a mean's third the first two have more
    nobody = flat(combined(aggregator, replies_of(-np.abs(vectors[:1]))).update)
    assert not nobody.any()


EVERY = [Median(), TrimmedMean(), Krum(), MultiKrum(), Bulyan(), GeometricMedian()]
EVERY += [CenteredClipping(), NormBound()]


@pytest.mark.parametrize("aggregator", EVERY, ids=lambda one: type(one).__name__)
def test_payloads_and_buffers_have_the_same_rule(aggregator):
    """A lie in a payload or a buffer alone, and equal replies of which nothing is lost."""
    ones = np.ones((8, 19))
    payloads, buffers = np.full((8, 3), 2.0), np.full((8, 2), 4.0)
    total = combined(aggregator, replies_of(ones, payloads, buffers))
    np.testing.assert_allclose(flat(total.update), 1.0)
    np.testing.assert_allclose(total.payloads["p"]["v"].numpy(), 8 * 2.0)
    np.testing.assert_allclose(total.buffers["b"].numpy(), 4.0)
    if not isinstance(aggregator, Krum):
        assert min(aggregator.trust.values()) == 1.0
    noise = drawn(8)
    payloads, buffers = payloads + noise[:, :3], buffers + noise[:, 3:5]
    payloads[5], buffers[5] = -1e6, 1e6
    total = combined(aggregator, replies_of(noise, payloads, buffers), round=2)
    assert np.abs(total.payloads["p"]["v"].numpy() / 8).max() < 10
    assert np.abs(total.buffers["b"].numpy()).max() < 10
    assert aggregator.trust[5] < 0.1


@pytest.mark.parametrize("rule", [Krum, MultiKrum])
def test_a_lie_in_a_payload_cannot_set_the_scale_by_which_it_is_judged(rule):
    """The fewest honest clients that the rule allows; the hostile updates are the honest mean."""
    attackers = 4
    honest = rule(attackers=attackers).least_vectors - attackers
    vectors, payloads = drawn(honest), drawn(honest, seed=1)
    vectors = np.concatenate([vectors, np.repeat(vectors.mean(0, keepdims=True), attackers, 0)])
    for lie in (1e2, 1e6):
        lies = np.full((attackers, 19), lie)
        aggregator = rule(attackers=attackers)
        combined(aggregator, replies_of(vectors, np.concatenate([payloads, lies])))
        assert [aggregator.trust[honest + i] for i in range(attackers)] == [0.0] * attackers


def test_buckets_hold_every_client_once_and_change_by_round():
    vectors = drawn(7)
    aggregator = TrimmedMean(trim=0.0, bucket_size=3, seed=5)
    partitions = [aggregator._buckets(7, round) for round in (1, 2)]
    assert partitions[0] != partitions[1]
    assert TrimmedMean(trim=0.0, bucket_size=3, seed=6)._buckets(7, 1) != partitions[0]
    for round, buckets in enumerate(partitions, 1):
        assert sorted(itertools.chain(*buckets)) == list(range(7))
        assert sorted(map(len, buckets)) == [1, 3, 3]
        means = [vectors[bucket].mean(0) for bucket in buckets]
        found = flat(combined(aggregator, replies_of(vectors), round).update)
        np.testing.assert_allclose(found, np.mean(means, axis=0))
    assert Krum(attackers=1, bucket_size=2).least == 9  # five buckets


@pytest.mark.parametrize(
    ("aggregator", "fits"),
    [(Krum(attackers=2), 7), (Bulyan(attackers=2), 11), (MultiKrum(attackers=1, select=6), 6)],
)
def test_too_small_a_cohort_is_refused(aggregator, fits):
    aggregator.check_cohort(20, fits)
    with pytest.raises(
        ConfigError, match=rf"attackers=\d.*needs {fits} replies.*at most {fits - 1}"
    ):
        aggregator.check_cohort(20, fits - 1)
