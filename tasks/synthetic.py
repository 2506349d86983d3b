"""A federated task that is drawn: every client's examples follow from the seed and its id.

Synthetic(alpha, beta) of Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated optimization in
heterogeneous networks. MLSys 2020, section 5.1, https://arxiv.org/abs/1812.06127, which LEAF has,
too. With x in R^60 and 10 classes, client k has

    y = argmax(W_k x + b_k),   W_k, b_k ~ N(u_k, 1),   u_k ~ N(0, alpha)
    x ~ N(v_k, Sigma),  Sigma_jj = j^-1.2,   v_k ~ N(B_k, 1),   B_k ~ N(0, beta)
    n_k = 50 + LogNormal(4, 2), rounded down, at most ``most``

alpha makes the clients' models differ, beta their inputs. Nothing is stored, and a client is drawn
only when it is asked, so a hundred thousand clients cost as much as those of a round.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import require_range, require_whole

Arrays = tuple[NDArray[np.float32], NDArray[np.int64]]
SIZE, CLASSES = 60, 10
_KEY = "task.data_options"
_LEAST, _LOG_MEAN, _LOG_STDDEV = 50, 4.0, 2.0  # for a client's number of examples
_SCALE = np.arange(1, SIZE + 1) ** -0.6  # the roots of Sigma_jj


def client_examples(
    client_id: int, seed: int, alpha: float = 1.0, beta: float = 1.0, most: int = 1000
) -> tuple[Arrays, None]:
    """Return a client's inputs (n_k, 60) and labels (n_k,); nothing is held out for testing.

    Args:
        client_id: k.
        seed: the run's seed.
        alpha: variance of the clients' mean weights.
        beta: variance of the clients' mean inputs.
        most: largest number of examples of a client.
    """
    require_range(f"{_KEY}.alpha", alpha, open_high=True)
    require_range(f"{_KEY}.beta", beta, open_high=True)
    require_whole(f"{_KEY}.most", most, low=_LEAST)
    count = _LEAST + int(_rng(seed, client_id, 0).lognormal(_LOG_MEAN, _LOG_STDDEV))
    return _draw(seed, client_id, alpha, beta, min(count, most), stream=1), None


def server_examples(
    num_clients: int,
    seed: int,
    alpha: float = 1.0,
    beta: float = 1.0,
    test_clients: int = 100,
    examples: int = 20,
) -> Arrays:
    """Return fresh examples of some clients, spread over all ids: the server's test set.

    Args:
        num_clients: N.
        seed: the run's seed.
        alpha: as above.
        beta: as above.
        test_clients: number of clients whose distributions are tested, at most N.
        examples: number of examples of each.
    """
    require_whole(f"{_KEY}.test_clients", test_clients, low=1)
    require_whole(f"{_KEY}.examples", examples, low=1)
    chosen = np.linspace(0, num_clients - 1, min(test_clients, num_clients)).round().astype(int)
    parts = [_draw(seed, int(k), alpha, beta, examples, stream=2) for k in np.unique(chosen)]
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _draw(seed: int, client: int, alpha: float, beta: float, count: int, stream: int) -> Arrays:
    """Draw examples of a client's distribution; ``stream`` tells apart train and test."""
    own = _rng(seed, client, 3)
    of_model, of_inputs = own.normal(0, alpha**0.5), own.normal(0, beta**0.5)
    weights, bias = own.normal(of_model, 1, (SIZE, CLASSES)), own.normal(of_model, 1, CLASSES)
    centre = own.normal(of_inputs, 1, SIZE)
    inputs = centre + _SCALE * _rng(seed, client, stream).normal(size=(count, SIZE))
    return inputs.astype(np.float32), (inputs @ weights + bias).argmax(axis=1)


def _rng(seed: int, client: int, stream: int) -> np.random.Generator:
    return np.random.default_rng([seed, client, stream])
