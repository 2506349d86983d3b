"""An audit of central privacy: how far one client more or less really moves what is released.

Clients pull a weight up, one pulls it down; all are clipped to C, so that the one is the worst
case. It is really missing: its node is not connected, or its answer does not arrive.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedhet.strategies.base import Reply
from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from fedhet.strategies.modes.private.clipping import arrays_of
from fedhet.strategies.modes.private.differential_privacy import (
    CentralAdaptive,
    CentralFixed,
    CentralPrivacy,
)
from fedhet.strategies.modes.private.gaussian_mechanism import epsilon_of
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.registration import FederationConfig
from fedhet.strategies.scaffold import SCAFFOLD
from tests.federation import Regression, TensorBatches, federate
from tests.strategies.modes.private.test_differential_privacy import server
from tests.strategies.modes.private.test_gaussian_mechanism import exact_epsilon
from tests.strategies.sides import built, released

N, ROUNDS, NORM, ODD = 8, 6, 0.3, 3
DATA = [
    TensorBatches(torch.ones(4, 1).double(), torch.full((4,), -900.0 if i == ODD else 900.0))
    for i in range(N)
]


class Recorder(CentralPrivacy):
    """Keeps what each round releases of a client, as one vector."""

    def __init__(self, *args, **how) -> None:
        super().__init__(*args, **how)
        self.released: list[np.ndarray] = []
        self.norms: list[float] = []

    def release(self, total):
        found = super().release(total)
        assert len(found.replies) == self.size  # the number of replies does not show
        payloads = {
            name: {key: value / self.size for key, value in tensors.items()}
            for name, tensors in found.payloads.items()
        }
        mean = replace(found.replies[0], update=found.update, payloads=payloads)
        self.released.append(np.concatenate([a.ravel() for a in arrays_of(mean)]))
        self.norms.append(self.norm.value)
        return found


def run(sampler, *, absent: Collection[int] = (), scaffold=False, adaptive=False, tamper=None):
    """Return what each round released, who took part, x after each round, and the side."""
    how = {"clients": N, "noise_multiplier": 0.0, "participation": sampler.participation}
    if adaptive:
        privacy = CentralAdaptive(initial_clipping_norm=NORM, clip_norm_lr=1.0, **how)
    else:
        privacy = CentralFixed(clipping_norm=NORM, **how)
    side = Recorder(privacy, privacy.norm(), secret=False)
    client, _ = privacy.halves(sampler)
    parts = SCAFFOLD().parts() if scaffold else Parts()
    strategy = built(
        client_sides={**parts.client_sides, "differential_privacy": client},
        server_sides={**parts.server_sides, "differential_privacy": side},
        aggregator=UniformMean(),
        sampler=sampler,
        local_lr=0.1,
        federation=FederationConfig(N, min_clients=1, connect_timeout_seconds=0.0),
    )
    path: list[Tensor] = []
    _, reports = federate(
        strategy,
        DATA,
        model=lambda: Regression(1),
        rounds=ROUNDS,
        absent=absent,
        on_round=lambda report, arrays: path.append(weight(arrays)),
        **({"tamper": tamper} if tamper else {}),
    )
    return side, [report.clients for report in reports[1:]], torch.stack(path).diff()


def weight(arrays) -> Tensor:
    return torch.tensor(arrays["head.weight"].numpy().item(), dtype=torch.float64)


def lost(message):
    trained = message.has_content() and "update" in message.content
    return None if trained and message.metadata.src_node_id == 1000 + ODD else message


GONE: dict[str, Callable] = {
    "not connected": lambda *how, **more: run(*how, absent=[ODD], **more),
    "lost": lambda *how, **more: run(*how, tamper=lost, **more),
}
SAMPLERS = {
    "everybody": FixedSizeSampler(),
    "a fixed number": FixedSizeSampler(participation=0.5, seed=1),
    "each by itself": BernoulliSampler(participation=0.5, seed=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("gone", GONE)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_one_client_moves_the_mean_by_what_the_accountant_assumes(sampler, gone):
    """C / m in the rounds that it takes part in, and nobody else's part in a round changes."""
    chosen = SAMPLERS[sampler]
    whole, cohorts, steps = run(chosen)
    rest, others, steps_of_rest = GONE[gone](chosen)
    assert others == [[client for client in cohort if client != ODD] for cohort in cohorts]
    asked = [ODD in cohort for cohort in cohorts]
    assert 0 < sum(asked) == whole.uploads[ODD] <= whole.uploads.most
    assumed = NORM / whole.size
    moved = [
        float(np.linalg.norm(a - b)) for a, b in zip(whole.released, rest.released, strict=True)
    ]
    assert moved == pytest.approx([assumed if took_part else 0.0 for took_part in asked])
    assert (steps - steps_of_rest).abs().tolist() == pytest.approx(moved)


@pytest.mark.slow
@pytest.mark.parametrize("gone", GONE)
def test_update_and_payload_together_move_by_no_more(gone):
    """SCAFFOLD's (update, delta c) is one vector of norm C."""
    whole, *_ = run(FixedSizeSampler(), scaffold=True)
    rest, *_ = GONE[gone](FixedSizeSampler(), scaffold=True)
    assert len(whole.released[0]) == 2
    moved = np.linalg.norm(whole.released[0] - rest.released[0])
    assert moved == pytest.approx(NORM / N)


@pytest.mark.slow
@pytest.mark.parametrize("gone", GONE)
def test_one_client_moves_the_adaptive_norm_by_half_a_count(gone):
    """Its bit is worth 1/2, clipped or not: C moves by exp(eta / (2 m))."""
    whole, *_ = run(FixedSizeSampler(), adaptive=True)
    rest, *_ = GONE[gone](FixedSizeSampler(), adaptive=True)
    assert abs(math.log(whole.norms[0] / rest.norms[0])) == pytest.approx(0.5 / N)


@pytest.mark.slow
def test_the_reported_epsilon_holds_for_the_measured_shift():
    """z = 1, 20 rounds. (At twice the shift, that of a mean over |S|, epsilon is 78.)"""
    whole, *_ = run(FixedSizeSampler())
    rest, *_ = run(FixedSizeSampler(), absent=[ODD])
    shift = float(np.linalg.norm(whole.released[0] - rest.released[0]))
    zeros = {"w": torch.zeros(200_000, dtype=torch.float64)}
    side = server(clients=N, clipping_norm=NORM)
    found = released(side, [Reply(i, 1, 1, 0.1, zeros) for i in range(N - 1)])
    noise = float(found.update["w"].std())
    for _ in range(20):
        side.asked(ODD)
    reported = side.metrics()["dp-epsilon"]
    assert exact_epsilon(noise / shift, 20) == pytest.approx(reported, rel=0.02)
    assert reported == epsilon_of(1.0, 20, 1e-5, "") == pytest.approx(28.1, abs=0.3)
