"""Flower draws noise, roundings and orders from the global generators: here from where we say."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_WORDS = 624  # of 32 bits: the whole state of numpy's global generator


@contextmanager
def flower_draws_from(seed: np.random.SeedSequence | None) -> Iterator[None]:
    """Seed numpy's global generator inside the block; that and Python's are put back after it.

    Args:
        seed: None draws as many bits as the generator's state has from the operating system.
    """
    python, state = random.getstate(), np.random.get_state()  # noqa: NPY002
    if seed is None:
        words = np.frombuffer(os.urandom(4 * _WORDS), np.uint32).tolist()
    else:
        words = seed.generate_state(4).tolist()
    np.random.seed(words)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(state)  # noqa: NPY002
