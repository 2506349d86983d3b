"""Seeds numpy's global generator, from which Flower draws, and draws the noise of privacy."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

# (standard deviation, shape) -> Gaussian noise
Noise = Callable[[float, tuple[int, ...]], NDArray[np.float64]]


@contextmanager
def seeded_numpy(seed: np.random.SeedSequence | None) -> Iterator[None]:
    """Seed numpy's global generator inside the block; restore it and Python's afterwards.

    None leaves numpy's generator as it is.
    """
    python, state = random.getstate(), np.random.get_state()  # noqa: NPY002
    if seed is not None:
        np.random.seed(seed.generate_state(4).tolist())  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(state)  # noqa: NPY002


@contextmanager
def noise_from(seed: np.random.SeedSequence | None) -> Iterator[Noise]:
    """Yield a source of Gaussian noise: hidden for None, else repeatable from the seed."""
    if seed is None:
        yield hidden_noise
        return
    with seeded_numpy(seed):
        yield lambda stddev, shape: np.asarray(np.random.normal(0, stddev, shape))  # noqa: NPY002


def hidden_noise(stddev: float, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return noise from the operating system's cryptographic generator (Box and Muller 1958).

    Numpy's generators hide nothing, whatever their seed: from enough bare noise, as in tensors that
    did not move, one can compute their state and all other noise.
    """
    count = math.prod(shape)
    words = np.frombuffer(os.urandom(16 * count), np.uint64).reshape(2, count)
    first, second = (words >> np.uint64(11)) * 2.0**-53  # in [0, 1)
    normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    return np.asarray(stddev * normal.reshape(shape))
