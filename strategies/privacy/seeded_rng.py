"""Seeds numpy's global generator, from which Flower draws noise, rounding and order."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_STATE_WORDS = 624  # of 32 bits each: the state of numpy's global generator


@contextmanager
def seeded_numpy(seed: np.random.SeedSequence | None) -> Iterator[None]:
    """Seed numpy's global generator inside the block; restore it and Python's afterwards.

    None draws the generator's whole state from the operating system.
    """
    python, state = random.getstate(), np.random.get_state()  # noqa: NPY002
    secret = np.frombuffer(os.urandom(4 * _STATE_WORDS), np.uint32)
    words = secret if seed is None else seed.generate_state(4)
    np.random.seed(words.tolist())  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(state)  # noqa: NPY002
