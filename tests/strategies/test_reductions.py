"""The reduction lattice: methods at their neutral setting equal their base, to the last bit."""

from functools import cache

import pytest
import torch

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
from fedhet.strategies.feddistill import FedDistill
from fedhet.strategies.feddw import FedDW
from fedhet.strategies.feddyn import FedDyn
from fedhet.strategies.federated import FederatedStrategy
from fedhet.strategies.fedexp import FedExP
from fedhet.strategies.fedmrur import FedMRUR
from fedhet.strategies.fedper import FedPer
from fedhet.strategies.fedproto import FedProto
from fedhet.strategies.fedprox import FedProx
from fedhet.strategies.fedpvr import FedPVR
from fedhet.strategies.fedrep import FedRep
from fedhet.strategies.fedsam import SAM, FedSAM, MoFedSAM
from fedhet.strategies.feduv import FedUV
from fedhet.strategies.modes.robust.geometric_median import GeometricMedian
from fedhet.strategies.moon import MOON
from fedhet.strategies.scaffold import SCAFFOLD
from tests.federation import InProcessGrid
from tests.strategies.labelled import Biasless, Classifier, assert_same, train
from tests.strategies.round.test_round import run as regress


def run(strategy: FederatedStrategy, model=Classifier, **how) -> dict[str, torch.Tensor]:
    """Return the params after some rounds with half the clients."""
    strategy.sampler = FixedSizeSampler(0.5, seed=2)
    return train(strategy, model=model, **{"rounds": 4, **how})[0]


LR = {"local_lr": 0.1}
PLAIN_MEAN = {"aggregator": UniformMean(), **LR}
FLAT = {"optimizer": lambda: SAM(rho=0.0)}
SHARP = {"optimizer": lambda: SAM(rho=0.2)}
FIRST = {"rounds": 1}
BFLOAT16 = {"options": LocalTrainingConfig(batch_size=8, epochs=2, autocast=True)}

fedavg = cache(lambda: run(FedAvg(**LR)))
biasless = cache(lambda: run(FedAvg(**LR), Biasless))
plain_mean = cache(lambda: run(FedAvg(**PLAIN_MEAN)))
first_round = cache(lambda: run(FedAvg(**LR), **FIRST))


def heavy(layers: str) -> dict:
    return {"optimizer": lambda: SGD(0.9, momentum_layers=layers)}


def two_phases(first: str) -> LocalTrainingConfig:
    phases = Phase(TensorSelector(first), 1), Phase(TensorSelector("body.*,head.*"))
    return LocalTrainingConfig(batch_size=8, epochs=2, phases=phases)


# a strategy, what it runs with, and the base that it equals
SAME = {
    "fedprox mu=0": (FedProx(0.0, **LR), {}, fedavg),
    "fedavgm momentum=0": (FedAvgM(momentum=0.0, lr=1.0, **LR), {}, fedavg),
    "feddistill coefficient=0": (FedDistill(0.0, **LR), {}, fedavg),
    "feddw mu=0": (FedDW(0.0, **LR), {"model": Biasless}, biasless),
    "fedproto coefficient=0": (FedProto(0.0, **LR), {}, fedavg),
    "fedproto, round 1": (FedProto(1.0, **LR), FIRST, first_round),
    "fedala eta=0": (FedALA(eta=0.0, **LR), {}, fedavg),
    "fedala, round 1": (FedALA(**LR), FIRST, first_round),
    "ditto": (Ditto(1.0, **LR), {}, fedavg),
    "apfl": (APFL(**LR), {}, fedavg),
    "feduv both 0": (FedUV(0.0, 0.0, **LR), {}, fedavg),
    "moon mu=0": (MOON(0.0, **LR), {}, fedavg),
    "moon, round 1": (MOON(**LR), FIRST, first_round),
    "fedsam rho=0": (FedSAM(**LR), FLAT, fedavg),
    "fedpvr none": (FedPVR("none", **LR), {}, plain_mean),
    "fedpvr all, I": (FedPVR("all", "I", **LR), {}, lambda: run(SCAFFOLD("I", **LR))),
    "fedpvr all, II": (FedPVR("all", **LR), {}, lambda: run(SCAFFOLD(**LR))),
    "feddyn alpha=0": (FedDyn(0.0, output=Latest(), **LR), {}, plain_mean),
    "feddyn alpha=0, participants": (FedDyn(0.0, **LR), {}, plain_mean),
    "fedexp large eps": (FedExP(1e9, **LR), {}, plain_mean),
    "fedcm alpha=1": (FedCM(1.0, **LR), {}, plain_mean),
    "mofedsam rho=0": (MoFedSAM(0.3, **LR), FLAT, lambda: run(FedCM(0.3, **LR))),
    "mofedsam rho=0 alpha=1": (MoFedSAM(1.0, **LR), FLAT, plain_mean),
    "mofedsam alpha=1": (MoFedSAM(1.0, **LR), SHARP, lambda: run(FedSAM(**PLAIN_MEAN), **SHARP)),
    "fedmrur gamma=0": (FedMRUR(0.0, **PLAIN_MEAN), SHARP, lambda: run(MoFedSAM(**LR), **SHARP)),
    "fedmrur all 0": (FedMRUR(0.0, alpha=1.0, **PLAIN_MEAN), FLAT, plain_mean),
    "momentum on no tensor": (FedAvg(**PLAIN_MEAN), heavy("none"), plain_mean),
    "fedper, personal=none": (FedPer(**LR), {"personal": "none"}, fedavg),
    "fedrep, phases of all tensors": (FedRep(**LR), {"options": two_phases("all")}, fedavg),
}
DIFFERENT = {
    "fedprox": (FedProx(1.0, **LR), {}, fedavg),
    "feddistill": (FedDistill(1.0, **LR), {}, fedavg),
    "feddw": (FedDW(**LR), {"model": Biasless}, biasless),
    "feddw, bfloat16": (
        FedDW(10.0, **LR),
        {"model": Biasless, **BFLOAT16},
        lambda: run(FedAvg(**LR), Biasless, **BFLOAT16),
    ),
    "fedproto": (FedProto(1.0, **LR), {}, fedavg),
    "fedala": (FedALA(**LR), {}, fedavg),
    "feduv, last batches of one": (FedUV(**LR), {}, fedavg),
    "feduv, bfloat16": (FedUV(**LR), BFLOAT16, lambda: run(FedAvg(**LR), **BFLOAT16)),
    "moon": (MOON(**LR), {}, fedavg),
    "fedcm": (FedCM(0.9, **LR), {}, plain_mean),
    "feddyn": (FedDyn(0.01, output=Latest(), **LR), {}, plain_mean),
    "mofedsam": (MoFedSAM(1.0, **LR), SHARP, plain_mean),
    "fedmrur gamma": (FedMRUR(0.1, sigma=10.0, alpha=1.0, **PLAIN_MEAN), FLAT, plain_mean),
    "fedmrur alpha": (FedMRUR(0.0, alpha=0.9, **PLAIN_MEAN), FLAT, plain_mean),
    "fedmrur rho": (FedMRUR(0.0, alpha=1.0, **PLAIN_MEAN), SHARP, plain_mean),
    "fedmrur norm mean": (FedMRUR(0.0, alpha=1.0, **LR), FLAT, plain_mean),
    "momentum on some tensors": (FedAvg(**PLAIN_MEAN), heavy("last:2"), plain_mean),
    "fedrep": (FedRep(**LR), {"options": two_phases("head.*")}, fedavg),
    "bfloat16": (FedAvg(**LR), BFLOAT16, fedavg),
    "another seed": (FedAvg(**LR), {"seed": 1}, fedavg),
}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "how", "base"), SAME.values(), ids=SAME)
def test_at_its_neutral_setting_a_method_is_its_base(method, how, base):
    assert_same(run(method, **how), base())


@pytest.mark.slow
@pytest.mark.parametrize(("method", "how", "base"), DIFFERENT.values(), ids=DIFFERENT)
def test_at_another_setting_it_is_not(method, how, base):
    params = run(method, **how)
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


KEEPS = {"aggregator": GeometricMedian(), **LR}  # all replies, until the last is there
NORMS = {"aggregator": NormMean(), **LR}


@pytest.mark.slow
@pytest.mark.parametrize(("method", "slots"), [(SCAFFOLD, LR), (FedAvg, KEEPS), (FedAvg, NORMS)])
def test_replies_in_another_order_give_the_same_bits(method, slots):
    """Of eight clients, in double precision: two numbers have one sum in either order."""
    one, other = (regress(method(**slots), count=8, grid=grid)[0] for grid in (Forwards, Backwards))
    assert_same(one, other)


@pytest.mark.slow
def test_fedpvr_corrects_only_its_tensors():
    strategy = FedPVR("last:2", **LR)
    run(strategy)
    control = strategy.server_sides["fedpvr"].control_variate
    assert list(control) == ["head.weight", "head.bias"]
    assert all(value.abs().max() > 0 for value in control.values())
