"""FedInit and FedLESAM: rounds by hand on quadratics. What FedSpeed and FedSMOO equal."""

import pytest
import torch

from fedhet.strategies.components.aggregators import UniformMean
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.model_outputs import Latest
from fedhet.strategies.feddyn import FedDyn
from fedhet.strategies.fedgamma import FedGAMMA
from fedhet.strategies.fedinit import FedInit
from fedhet.strategies.fedlesam import LESAM, FedLESAM
from fedhet.strategies.fedsam import FedSAM
from fedhet.strategies.fedsmoo import DualSAM, FedSMOO
from fedhet.strategies.fedspeed import FedSpeed
from fedhet.strategies.scaffold import SCAFFOLD
from tests.federation import Regression, federate
from tests.strategies.sides import built, sam
from tests.strategies.test_closed_forms import Listed, scalars

WEIGHT = "head.weight"


def end(method, rounds, optimizer=None, cohorts=(), epochs=1, **given) -> float:
    """Return x of two clients with f_i = (a_i w - b_i)^2 / 2, a = (1, 2), b = (1, 4); eta_l .1."""
    params, _ = federate(
        built(method, local_lr=0.1, sampler=Listed(*cohorts), **given),
        scalars(),
        model=lambda: Regression(1),
        rounds=rounds,
        options=LocalTrainingConfig(epochs=epochs),
        **({"optimizer": optimizer} if optimizer else {}),
    )
    return float(params[WEIGHT])


def lesam(rho: float) -> LESAM:
    return LESAM(rho=rho)


def dual(rho: float) -> DualSAM:
    return DualSAM(rho=rho)


def test_fedinit_starts_beyond_the_received_model():
    """Slopes w - 1 and 4 w - 8, one step.

    Round 1: y = (.1, .8), x = .45. Round 2, beta .5: y_0 = .45 + .5 (.35, -.35) = (.625, .275);
    y = .625 + .0375 and .275 + .69, x = .81375.
    """
    assert end(FedInit, 1, beta=0.5) == pytest.approx(0.45, abs=1e-12)
    assert end(FedInit, 2, beta=0.5) == pytest.approx((0.6625 + 0.965) / 2, abs=1e-12)


def test_fedlesam_climbs_along_the_way_that_the_global_model_came():
    """Round 1 has no direction: x = .45. Then e = -rho for both: y = .45 - .1 g(.45 - .2).

    g = (-.75, -7), y = (.525, 1.15), x = .8375. A client that has its first round late has no e.
    """
    assert end(FedLESAM, 1, lambda: lesam(0.2)) == pytest.approx(0.45, abs=1e-6)
    assert end(FedLESAM, 2, lambda: lesam(0.2)) == pytest.approx(0.8375, abs=1e-6)
    late = end(FedLESAM, 2, lambda: lesam(0.2), cohorts=([0], [1]))
    assert late == pytest.approx(0.1 + 0.1 * (8 - 0.4), abs=1e-12)  # g(.1) without e


@pytest.mark.parametrize("rho", [0.0, 0.2])
def test_the_dual_variable_and_the_common_perturbation_turn_the_ascent(rho):
    """Gradient (3, 4), m = (3, 0), s = (0, -1): v = (0, 5), so e = (0, rho) and m += e - s."""
    weight = torch.tensor([3.0, 4.0], dtype=torch.float64, requires_grad=True)
    optimizer = dual(rho)
    m, s = (torch.tensor(v, dtype=torch.float64) for v in ([3.0, 0.0], [0.0, -1.0]))
    optimizer.dual, optimizer.common = {"w": m}, {"w": s}
    optimizer.start({"w": weight}, lr=0.1)
    seen = []

    def backward(batch):
        seen.append(weight.detach().clone())
        weight.grad = None
        loss = 0.5 * weight.square().sum()
        loss.backward()
        return loss.detach()

    optimizer.step(lambda: None, backward, lambda: None)
    if rho:
        expected = torch.tensor([3.0, 4.2], dtype=torch.float64)
        torch.testing.assert_close(seen[1], expected, rtol=0, atol=1e-7)
        moved = torch.tensor([3.0, 1.2], dtype=torch.float64)
        torch.testing.assert_close(m, moved, rtol=0, atol=1e-7)
    else:
        assert m.tolist() == [3.0, 0.0]


@pytest.mark.parametrize(
    ("method", "given", "base", "with_"),
    [(FedSpeed, {"mu": 0.0}, FedSAM, {"aggregator": UniformMean()}), (FedGAMMA, {}, SCAFFOLD, {})],
    ids=["fedspeed mu=0", "fedgamma"],
)
def test_what_a_method_adds_nothing_to(method, given, base, with_):
    """With SAM's steps in both, and every client in half of the rounds."""
    how = {"optimizer": lambda: sam(0.2), "cohorts": ([0], [1], [0, 1]), "epochs": 2}
    assert end(method, 4, **how, **given) == end(base, 4, **how, **with_)


def test_without_perturbation_fedspeed_and_fedsmoo_are_feddyn():
    """The terms enter as a gradient or as a penalty, so the last bits may differ."""
    how = {"cohorts": ([0], [1], [0, 1]), "epochs": 3}
    dyn = end(FedDyn, 4, alpha=0.5, output=Latest(), **how)
    assert end(FedSpeed, 4, lambda: sam(0.0), mu=0.5, **how) == pytest.approx(dyn, rel=1e-12)
    assert end(FedSMOO, 4, lambda: dual(0.0), mu=0.5, rho=0.0, **how) == pytest.approx(
        dyn, rel=1e-12
    )
