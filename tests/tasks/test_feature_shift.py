"""Images as each client's own camera takes them."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from fedhet.conf import FOLDER
from fedhet.tasks.feature_shift import FeatureShift
from fedhet.tasks.task import build_task
from tests.refused import refused

SIZES = {"brightness": 0.3, "contrast": 0.5, "noise": 0.2, "rotation": 30.0}
IMAGES = np.random.default_rng(0).integers(0, 256, (6, 3, 8, 8), dtype=np.uint8)


def shift(**sizes: float) -> FeatureShift:
    plain = {"brightness": 0.0, "contrast": 1.0, "noise": 0.0, "rotation": 0.0}
    return FeatureShift(**{**plain, **sizes}, seed=(1, 2))


def test_a_shift_by_hand():
    assert np.array_equal(shift()(IMAGES, 0), IMAGES)
    lighter = shift(brightness=0.2)(IMAGES, 0)
    assert np.array_equal(lighter, np.minimum(IMAGES.astype(int) + 51, 255))
    half = shift(contrast=0.5)(IMAGES, 0).astype(float)
    np.testing.assert_allclose(half, 63.75 + IMAGES / 2, atol=0.51)
    quarter = shift(rotation=90.0)(IMAGES, 0)
    assert np.array_equal(quarter, np.rot90(IMAGES, k=1, axes=(2, 3)))
    noisy = shift(noise=0.1)(np.full((50, 1, 20, 20), 128, np.uint8), 0).astype(float)
    assert noisy.mean() == pytest.approx(128, abs=1)
    assert noisy.std() == pytest.approx(25.5, rel=0.05)


def test_draws_follow_from_seed_and_client_and_stay_within_the_sizes():
    drawn = [FeatureShift.of_client(SIZES, 7, client) for client in range(200)]
    assert drawn[3] == FeatureShift.of_client(SIZES, 7, 3)
    assert len({one.brightness for one in drawn}) == 200
    for name, most in (("brightness", 0.3), ("noise", 0.2), ("rotation", 30.0)):
        values = np.array([getattr(one, name) for one in drawn])
        assert 0.9 * most < np.abs(values).max() <= most
    assert all(abs(np.log(one.contrast)) <= 0.5 for one in drawn)
    assert np.array_equal(drawn[0](IMAGES, 0), drawn[0](IMAGES, 0))
    assert not np.array_equal(drawn[0](IMAGES, 0), drawn[0](IMAGES, 1))


def plain_task(name: str) -> dict:
    return OmegaConf.to_container(OmegaConf.load(FOLDER / "task" / f"{name}.yaml"))


def partition(**more) -> dict:
    return {"name": "feature_shift", **SIZES, "holdout": 0.3, **more}


@pytest.mark.slow
def test_clients_see_their_own_camera_and_the_test_set_is_as_it_was():
    """Client 1 is compared with iid, of the same rows."""
    tasks = [
        build_task(plain_task("digits"), chosen, seed=3, num_clients=4)
        for chosen in (partition(), {"name": "iid", "holdout": 0.3})
    ]
    (train, held_out), (plain, plain_held_out) = (task.client_data(1) for task in tasks)
    assert torch.equal(train.labels, plain.labels)
    assert torch.equal(held_out.labels, plain_held_out.labels)
    pairs = [(train, plain), (held_out, plain_held_out)]
    tests = [task.test_data() for task in tasks]
    first = [
        [next(iter(one.batches(500, generator=None, train=False)))[0] for one in pair]
        for pair in (*pairs, tests)
    ]
    assert [torch.equal(*pair) for pair in first] == [False, False, True]


def test_other_tasks_are_refused():
    with refused("partition=feature_shift"):
        build_task(plain_task("imdb"), partition(), seed=0, num_clients=2)
