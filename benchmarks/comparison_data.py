"""The comparison's data: two disjoint parts of each data set, ``tune`` and ``final``.

The keys are chosen on the first part, and the chosen values are measured on the second, so no
example chooses and tests. Images are made small, and texts are counted words: a perceptron of 64
neurons learns all of them. Digits and breast_cancer come with scikit-learn; the others are read
from FEDHET_DATA.
"""

from __future__ import annotations

import io
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.tasks import heart_disease
from fedhet.tasks.feature_shift import FeatureShift

Arrays = tuple[NDArray[Any], ...]
PARTS = ("tune", "final")
MOST = {"tune": 750, "final": 2000}  # examples; of digits a third, and the rest
TEST_SHARE = 0.4
PIXELS = {"mnist": 14, "cifar10": 8}  # a side
WORDS = 1024
SHIFT = {"brightness": 0.3, "contrast": 0.5, "noise": 0.2, "rotation": 30.0}


def load(
    name: str,
    part: str,
    pooled_test: bool,
    seed: int,
    num_clients: int,
    cameras: bool = False,
    flat: bool = True,
) -> tuple[Arrays, Arrays | None]:
    """Return (train, test): inputs, labels and, at natural sites, the clients.

    Args:
        name: digits, breast_cancer, heart_disease, mnist, cifar10 or imdb.
        part: tune or final.
        pooled_test: whether the part's last 40 % are the server's test set; otherwise all
            examples are the clients', who hold out as many (partition.holdout).
        seed: of the clients' cameras.
        num_clients: N.
        cameras: each client sees its images through a camera of its own.
        flat: whether an image is a vector, as a perceptron takes it; else (channels, side, side).
    """
    arrays = _part(name, part)
    if cameras:
        arrays = _through_cameras(arrays, seed, num_clients)
    if name != "heart_disease":
        arrays = (_scaled(arrays[0], flat), *arrays[1:])
    count = len(arrays[1])
    order = np.random.default_rng(1).permutation(count)
    first = order[: count - int(TEST_SHARE * count)] if pooled_test else order
    last = order[len(first) :]
    return tuple(a[first] for a in arrays), tuple(a[last] for a in arrays) if pooled_test else None


@lru_cache
def _part(name: str, part: str) -> Arrays:
    if name == "heart_disease":
        return heart_disease.load()[1 - PARTS.index(part)]  # 254 patients, 486 patients
    inputs, labels = _all(name)
    chosen = np.random.default_rng(0).permutation(len(labels))
    first = min(MOST["tune"], len(labels) // 3)
    rows = chosen[:first] if part == "tune" else chosen[first : first + MOST["final"]]
    return _read(name, inputs[rows]), labels[rows]


@lru_cache
def _all(name: str) -> Arrays:
    """Return all inputs, images and texts as they are stored, and their labels."""
    if name == "digits":
        from sklearn.datasets import load_digits

        found = load_digits()
        return np.asarray(found.images, dtype=np.float32)[:, None] / 16, found.target.astype(int)
    if name == "breast_cancer":
        from sklearn.datasets import load_breast_cancer
        from sklearn.preprocessing import scale

        table = load_breast_cancer()
        return scale(table.data), table.target.astype(int)
    import pyarrow.parquet as pq

    table = pq.read_table(Path(os.environ["FEDHET_DATA"]) / name / "train.parquet")
    columns = [c for c in table.column_names if c in ("image", "img", "text")]
    inputs = np.asarray(table[columns[0]].to_pylist(), dtype=object)
    return inputs, np.asarray(table["label"].to_pylist(), dtype=int)


def _read(name: str, stored: NDArray[Any]) -> NDArray[np.float32]:
    if name in ("digits", "breast_cancer"):
        return np.asarray(stored, dtype=np.float32)
    if name == "imdb":
        from sklearn.feature_extraction.text import HashingVectorizer

        vectors = HashingVectorizer(n_features=WORDS, alternate_sign=False, binary=True)
        return np.asarray(vectors.transform(stored).todense(), dtype=np.float32)
    from PIL import Image

    size = (PIXELS[name], PIXELS[name])
    images = [Image.open(io.BytesIO(one["bytes"])) for one in stored]
    small = [np.asarray(one.resize(size, Image.Resampling.BOX)) for one in images]
    found = np.stack([one if one.ndim == 3 else one[:, :, None] for one in small])
    return np.asarray(found.transpose(0, 3, 1, 2) / np.float32(255), dtype=np.float32)


def _through_cameras(arrays: Arrays, seed: int, num_clients: int) -> Arrays:
    images, labels = arrays
    clients = np.arange(len(labels)) % num_clients
    seen = (images * 255).astype(np.uint8)
    for client in range(num_clients):
        camera = FeatureShift.of_client(SHIFT, seed, client)
        seen[clients == client] = camera(seen[clients == client], 0)
    return seen.astype(np.float32) / 255, labels, clients.astype(str)


def _scaled(inputs: NDArray[np.float32], flat: bool) -> NDArray[np.float32]:
    """Return inputs with mean 0 and variance 1 over all of their numbers."""
    shaped = inputs.reshape(len(inputs), -1) if flat else inputs
    return np.asarray((shaped - shaped.mean()) / shaped.std(), dtype=np.float32)


def synthetic(
    client_id: int, part: str, seed: int, pooled_test: bool, alpha: float = 1.0, beta: float = 1.0
) -> tuple[Arrays, None]:
    """Return a client of Synthetic; the seeds of the parts draw different federations."""
    from fedhet.tasks.synthetic import client_examples

    drawn = seed + 1000 * PARTS.index(part)
    return client_examples(client_id, drawn, alpha, beta, most=400)


def synthetic_test(
    num_clients: int,
    part: str,
    seed: int,
    pooled_test: bool,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Arrays:
    """Return the clients' fresh examples, the server's test set."""
    from fedhet.tasks.synthetic import server_examples

    drawn = seed + 1000 * PARTS.index(part)
    return server_examples(num_clients, drawn, alpha, beta, examples=100)
