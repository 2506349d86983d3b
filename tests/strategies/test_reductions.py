"""The reduction lattice: methods at their neutral setting equal their base, to the last bit."""

from functools import cache

import pytest
import torch
from torch import nn

from fedhet.strategies.apfl import APFL
from fedhet.strategies.components.aggregators import NormMean, UniformMean
from fedhet.strategies.components.local_optimizers import SGD
from fedhet.strategies.components.local_training_config import LocalTrainingConfig, Phase
from fedhet.strategies.components.model_outputs import Latest
from fedhet.strategies.components.samplers import FixedSizeSampler
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.ditto import Ditto
from fedhet.strategies.fedala import FedALA
from fedhet.strategies.fedavg import FedAvg, FedAvgM
from fedhet.strategies.fedcm import FedCM
from fedhet.strategies.feddecorr import FedDecorr
from fedhet.strategies.feddistill import FedDistill
from fedhet.strategies.feddw import FedDW
from fedhet.strategies.feddyn import FedDyn
from fedhet.strategies.fedexp import FedExP
from fedhet.strategies.fedinit import FedInit
from fedhet.strategies.fedlc import FedLC, LogitAdjustment
from fedhet.strategies.fedlesam import LESAM, FedLESAM
from fedhet.strategies.fedmrur import FedMRUR
from fedhet.strategies.fedntd import FedNTD
from fedhet.strategies.fedper import FedPer
from fedhet.strategies.fedproto import FedProto
from fedhet.strategies.fedprox import FedProx
from fedhet.strategies.fedpvr import FedPVR
from fedhet.strategies.fedrep import FedRep
from fedhet.strategies.fedsam import FedSAM, MoFedSAM
from fedhet.strategies.feduv import FedUV
from fedhet.strategies.method import Method
from fedhet.strategies.modes.robust.geometric_median import GeometricMedian
from fedhet.strategies.moon import MOON
from fedhet.strategies.scaffold import SCAFFOLD
from tests.federation import InProcessGrid
from tests.strategies.labelled import Biasless, Classifier, assert_same, train
from tests.strategies.round.test_round import run as regress
from tests.strategies.sides import built, sam


class Spare(Classifier):
    """Has a layer that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)
        nn.init.ones_(self.spare.weight)
        nn.init.ones_(self.spare.bias)


def run(method: type[Method], given=None, how=None) -> dict[str, torch.Tensor]:
    """Return the params after some rounds with half the clients."""
    sampler = FixedSizeSampler(participation=0.5, seed=2)
    strategy = built(method, **{"local_lr": 0.1, "sampler": sampler, **(given or {})})
    return train(strategy, **{"model": Classifier, "rounds": 4, **(how or {})})[0]


MEAN = {"aggregator": UniformMean()}
FLAT = {"optimizer": lambda: sam(rho=0.0)}
AHEAD = {"optimizer": lambda: LESAM(rho=0.2)}
STILL = {"optimizer": lambda: LESAM(rho=0.0)}
SHARP = {"optimizer": lambda: sam(rho=0.2)}
FIRST = {"rounds": 1}
NO_BIAS = {"model": Biasless}
SPARE = {"model": Spare, "optimizer": lambda: SGD(weight_decay=0.5)}
BFLOAT16 = {"options": LocalTrainingConfig(batch_size=8, epochs=2, autocast=True)}


def alpha(value: float, **more) -> dict:
    return {"client_momentum": {"alpha": value}, **more}


def heavy(layers: str) -> dict:
    return {"optimizer": lambda: SGD(momentum=0.9, momentum_layers=layers)}


def two_phases(first: str) -> dict:
    phases = Phase(TensorSelector(first), 1), Phase(TensorSelector("body.*,head.*"))
    return {"options": LocalTrainingConfig(batch_size=8, epochs=2, phases=phases)}


fedavg = cache(lambda: run(FedAvg))
biasless = cache(lambda: run(FedAvg, {}, NO_BIAS))
plain_mean = cache(lambda: run(FedAvg, MEAN))
first_round = cache(lambda: run(FedAvg, {}, FIRST))

# a method, its parameters, what it runs with, and the base that it equals
SAME = {
    "fedprox mu=0": (FedProx, {"mu": 0.0}, {}, fedavg),
    "fedprox mu=0, spare layer": (FedProx, {"mu": 0.0}, SPARE, lambda: run(FedAvg, {}, SPARE)),
    "ditto, spare layer": (Ditto, {}, SPARE, lambda: run(FedAvg, {}, SPARE)),
    "fedavgm momentum=0": (FedAvgM, {"momentum": 0.0, "server_lr": 1.0}, {}, fedavg),
    "feddistill coefficient=0": (FedDistill, {"coefficient": 0.0}, {}, fedavg),
    "feddw mu=0": (FedDW, {"mu": 0.0}, NO_BIAS, biasless),
    "fedntd beta=0": (FedNTD, {"beta": 0.0}, {}, fedavg),
    "fedlc tau=0": (FedLC, {"tau": 0.0}, {}, fedavg),
    "logit_adjustment tau=0": (LogitAdjustment, {"tau": 0.0}, {}, fedavg),
    "feddecorr beta=0": (FedDecorr, {"beta": 0.0}, {}, fedavg),
    "fedinit beta=0": (FedInit, {"beta": 0.0}, {}, plain_mean),
    "fedinit, round 1": (FedInit, {}, FIRST, lambda: run(FedAvg, MEAN, FIRST)),
    "fedlesam rho=0": (FedLESAM, {}, STILL, plain_mean),
    "fedlesam, round 1": (FedLESAM, {}, AHEAD | FIRST, lambda: run(FedAvg, MEAN, FIRST)),
    "fedproto coefficient=0": (FedProto, {"coefficient": 0.0}, {}, fedavg),
    "fedproto, round 1": (FedProto, {}, FIRST, first_round),
    "fedala eta=0": (FedALA, {"eta": 0.0}, {}, fedavg),
    "fedala, round 1": (FedALA, {}, FIRST, first_round),
    "ditto": (Ditto, {}, {}, fedavg),
    "apfl": (APFL, {}, {}, fedavg),
    "feduv both 0": (FedUV, {"variance": 0.0, "uniformity": 0.0}, {}, fedavg),
    "moon mu=0": (MOON, {"mu": 0.0}, {}, fedavg),
    "moon, round 1": (MOON, {}, FIRST, first_round),
    "fedsam rho=0": (FedSAM, {}, FLAT, fedavg),
    "fedpvr none": (FedPVR, {"layers": "none"}, {}, plain_mean),
    "fedpvr I": (
        FedPVR,
        {"layers": "all", "option": "I"},
        {},
        lambda: run(SCAFFOLD, {"option": "I"}),
    ),
    "fedpvr II": (FedPVR, {"layers": "all"}, {}, lambda: run(SCAFFOLD)),
    "feddyn alpha=0": (FedDyn, {"alpha": 0.0, "output": Latest()}, {}, plain_mean),
    "feddyn alpha=0, participants": (FedDyn, {"alpha": 0.0}, {}, plain_mean),
    "fedexp large eps": (FedExP, {"eps": 1e9}, {}, plain_mean),
    "fedcm alpha=1": (FedCM, alpha(1.0), {}, plain_mean),
    "mofedsam rho=0": (MoFedSAM, alpha(0.3), FLAT, lambda: run(FedCM, alpha(0.3))),
    "mofedsam rho=0 alpha=1": (MoFedSAM, alpha(1.0), FLAT, plain_mean),
    "mofedsam alpha=1": (MoFedSAM, alpha(1.0), SHARP, lambda: run(FedSAM, MEAN, SHARP)),
    "fedmrur gamma=0": (FedMRUR, {"gamma": 0.0, **MEAN}, SHARP, lambda: run(MoFedSAM, {}, SHARP)),
    "fedmrur all 0": (FedMRUR, alpha(1.0, gamma=0.0, **MEAN), FLAT, plain_mean),
    "momentum on no tensor": (FedAvg, MEAN, heavy("none"), plain_mean),
    "fedper, personal=none": (FedPer, {}, {"personal": "none"}, fedavg),
    "fedrep, phases of all tensors": (FedRep, {}, two_phases("all"), fedavg),
}
BOTH = NO_BIAS | BFLOAT16
DIFFERENT = {
    "fedprox": (FedProx, {"mu": 1.0}, {}, fedavg),
    "feddistill": (FedDistill, {}, {}, fedavg),
    "feddw": (FedDW, {}, NO_BIAS, biasless),
    "feddw, bfloat16": (FedDW, {"mu": 10.0}, BOTH, lambda: run(FedAvg, {}, BOTH)),
    "fedntd": (FedNTD, {}, {}, fedavg),
    "fedlc": (FedLC, {}, {}, fedavg),
    "logit_adjustment": (LogitAdjustment, {}, {}, fedavg),
    "feddecorr": (FedDecorr, {}, {}, fedavg),
    "feddecorr, bfloat16": (FedDecorr, {}, BFLOAT16, lambda: run(FedAvg, {}, BFLOAT16)),
    "fedinit": (FedInit, {}, {}, plain_mean),
    "fedlesam": (FedLESAM, {}, AHEAD, plain_mean),
    "fedproto": (FedProto, {}, {}, fedavg),
    "fedala": (FedALA, {}, {}, fedavg),
    "feduv, last batches of one": (FedUV, {}, {}, fedavg),
    "feduv, bfloat16": (FedUV, {}, BFLOAT16, lambda: run(FedAvg, {}, BFLOAT16)),
    "moon": (MOON, {}, {}, fedavg),
    "fedcm": (FedCM, alpha(0.9), {}, plain_mean),
    "feddyn": (FedDyn, {"alpha": 0.01, "output": Latest()}, {}, plain_mean),
    "mofedsam": (MoFedSAM, alpha(1.0), SHARP, plain_mean),
    "fedmrur gamma": (FedMRUR, alpha(1.0, gamma=0.1, sigma=10.0, **MEAN), FLAT, plain_mean),
    "fedmrur alpha": (FedMRUR, alpha(0.9, gamma=0.0, **MEAN), FLAT, plain_mean),
    "fedmrur rho": (FedMRUR, alpha(1.0, gamma=0.0, **MEAN), SHARP, plain_mean),
    "fedmrur norm mean": (FedMRUR, alpha(1.0, gamma=0.0), FLAT, plain_mean),
    "momentum on some tensors": (FedAvg, MEAN, heavy("last:2"), plain_mean),
    "fedrep": (FedRep, {}, two_phases("head.*"), fedavg),
    "bfloat16": (FedAvg, {}, BFLOAT16, fedavg),
    "another seed": (FedAvg, {}, {"seed": 1}, fedavg),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "given", "how", "base"), SAME.values(), ids=SAME)
def test_at_its_neutral_setting_a_method_is_its_base(method, given, how, base):
    assert_same(run(method, given, how), base())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "given", "how", "base"), DIFFERENT.values(), ids=DIFFERENT)
def test_at_another_setting_it_is_not(method, given, how, base):
    params = run(method, given, how)
    assert all(value.isfinite().all() for value in params.values())
    assert not torch.equal(params["head.weight"], base()["head.weight"])


class Backwards(InProcessGrid):
    def __init__(self, *how) -> None:
        super().__init__(*how)
        self.shuffle = list.reverse


class Forwards(Backwards):
    def __init__(self, *how) -> None:
        super().__init__(*how)
        self.shuffle = list.copy  # it stays as it is


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "slots"),
    # the geometric median keeps all replies until the last is there
    [
        (SCAFFOLD, {}),
        (FedAvg, {"aggregator": GeometricMedian()}),
        (FedAvg, {"aggregator": NormMean()}),
    ],
)
def test_replies_in_another_order_give_the_same_bits(method, slots):
    """Of eight clients, in double precision: two numbers have one sum in either order."""
    one, other = (
        regress(built(method, local_lr=0.1, **slots), count=8, grid=grid)[0]
        for grid in (Forwards, Backwards)
    )
    assert_same(one, other)


@pytest.mark.slow
def test_fedpvr_corrects_only_its_tensors():
    strategy = built(FedPVR, layers="last:2", local_lr=0.1)
    train(strategy, model=Classifier)
    control = strategy.server_sides["fedpvr"].control_variate
    assert list(control) == ["head.weight", "head.bias"]
    assert all(value.abs().max() > 0 for value in control.values())
