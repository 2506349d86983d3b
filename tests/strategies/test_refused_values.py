"""A value out of its range is refused by the name of its key."""

import pytest
from torch import nn

from fedhet.strategies.apfl import APFLClient
from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from fedhet.strategies.components.schedules import MultiStep
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.dense import DENSE, Distilled
from fedhet.strategies.ditto import DittoClient
from fedhet.strategies.ensemble import Ensemble
from fedhet.strategies.fedala import FedALAClient
from fedhet.strategies.fedcm import ClientMomentum
from fedhet.strategies.feddistill import FedDistillClient
from fedhet.strategies.feddw import FedDWClient
from fedhet.strategies.feddyn import FedDynClient, FedDynServer
from fedhet.strategies.fedexp import ExtrapolatedMean
from fedhet.strategies.fedmrur import ManifoldRegularizer
from fedhet.strategies.fednova import FedNovaClient
from fedhet.strategies.fedproto import PrototypeClient
from fedhet.strategies.fedprox import FedProxClient
from fedhet.strategies.fedsam import SAM
from fedhet.strategies.feduv import FedUVClient
from fedhet.strategies.fusion.distillation import Distillation, Generation
from fedhet.strategies.maecho import Algorithm1, Equation11, HarmonizedOptima, Released
from fedhet.strategies.moon import MOONClient
from fedhet.strategies.per_fedavg import PerFedAvgOptimizer
from fedhet.strategies.pfedme import PFedMeClient
from fedhet.strategies.pfnm import PFNM, NeuralMatching
from fedhet.strategies.scaffold import ControlVariateClient
from fedhet.strategies.statistics.soft_labels import SoftLabelServer
from tests.federation import Regression
from tests.refused import refused
from tests.strategies.labelled import Biasless, Classifier
from tests.strategies.sides import check_side

WRONG = [
    (Distilled, "strategy.dense", {"epochs": [-1], "initial": ["mean"], "crop_padding": [-1]}),
    (Generation, "strategy.dense", {"images": [0], "bn": [-1.0]}),
    (lambda generator_lr: Generation(lr=generator_lr), "strategy.dense", {"generator_lr": [0.0]}),
    (Distillation, "strategy.dense", {"batch_size": [1], "temperature": [0.0]}),
    (APFLClient, "strategy.apfl", {"alpha": [-0.1, 1.1], "alpha_lr": [-1.0]}),
    (DittoClient, "strategy.ditto", {"coefficient": [-1.0]}),
    (PFedMeClient, "strategy.pfedme", {"coefficient": [-1.0], "steps": [0], "lr": [0.0]}),
    (FedALAClient, "strategy.fedala", {"eta": [-1.0], "data_share": [0.0, 1.5]}),
    (FedALAClient, "strategy.fedala", {"until_std": [0.0]}),
    (ClientMomentum, "strategy.client_momentum", {"alpha": [0.0, -0.1, 1.1]}),
    (FedDistillClient, "strategy.feddistill", {"coefficient": [-1.0]}),
    (FedDWClient, "strategy.feddw", {"mu": [-1], "decay": [1.5], "decay_every": [0]}),
    (FedDWClient, "strategy.feddw", {"linearised_every": [-1, 0.5]}),
    (FedDynClient, "strategy.feddyn", {"alpha": [-0.1]}),
    (FedDynServer, "strategy.feddyn", {"alpha": [-0.1]}),
    (ExtrapolatedMean, "strategy.fedexp", {"eps": [0.0, -1.0]}),
    (ManifoldRegularizer, "strategy.fedmrur", {"gamma": [-1.0], "sigma": [0.0], "beta": [0.0]}),
    (ManifoldRegularizer, "strategy.fedmrur", {"space": ["flat"], "lifts": ["labels"]}),
    (PrototypeClient, "strategy.fedproto", {"coefficient": [-1.0]}),
    (FedProxClient, "strategy.fedprox", {"mu": [-1.0]}),
    (SAM, "strategy.sam", {"rho": [-0.1]}),
    (FedUVClient, "strategy.feduv", {"variance": [-1.0], "uniformity": [-1.0]}),
    (HarmonizedOptima, "strategy.maecho", {"iterations": [-1], "weights": ["best"]}),
    (HarmonizedOptima, "strategy.maecho", {"initial": ["last"], "cap": [0.0]}),
    (Released, "strategy.maecho", {"step": [2.5]}),
    (Algorithm1, "strategy.maecho", {"eta": [0.0]}),
    (Equation11, "strategy.maecho", {"mu": [-1.0]}),
    (MOONClient, "strategy.moon", {"mu": [-1.0], "tau": [0.0], "previous": [0]}),
    (PerFedAvgOptimizer, "strategy.per_fedavg", {"alpha": [-1.0], "order": ["second"]}),
    (PerFedAvgOptimizer, "strategy.per_fedavg", {"delta": [0.0]}),
    (NeuralMatching, "strategy.pfnm", {"sigma": [0], "sigma0": [0], "gamma": [0]}),
    (NeuralMatching, "strategy.pfnm", {"max_neurons": [0]}),
    (ControlVariateClient, "strategy.scaffold", {"option": ["III"]}),
    (SoftLabelServer, "strategy.soft_labels", {"history": ["every"], "absent": ["zero"]}),
    (SoftLabelServer, "strategy.soft_labels", {"smoothing": [1.5]}),
    (FixedSizeSampler, "", {"participation": [0.0, -0.1, 1.1]}),
    (BernoulliSampler, "", {"participation": [0.0, 1.1]}),
    (MultiStep, "schedule", {"milestones": [[0.5, 1.0], [0.0]], "decay": [0.0, 1.5]}),
]
CASES = [
    pytest.param(part, {key: value}, f"{prefix}.{key}={value!r}".lstrip("."), id=f"{key}={value!r}")
    for part, prefix, wrong in WRONG
    for key, values in wrong.items()
    for value in values
]


@pytest.mark.parametrize(("part", "wrong", "said"), CASES)
def test_a_value_out_of_range_names_its_key(part, wrong, said):
    with refused(said):
        part(**wrong)


@pytest.mark.parametrize("spec", ["last:0", "last:x", "first:"])
def test_a_malformed_selector_names_its_key_and_the_syntax(spec):
    with refused(f"local.x='{spec}'", "last:N"):
        TensorSelector(spec, "local.x")


SMALL, HEAVY = Regression(1), SGD(momentum=0.9)
NO_HEAD = nn.ModuleDict({"last": nn.Linear(2, 2, bias=False)})


@pytest.mark.parametrize(
    ("side", "model", "optimizer", "message"),
    [
        # option II reads the gradient off plain steps
        (ControlVariateClient(), SMALL, HEAVY, "scaffold.option=II local.optimizer=sgd"),
        (ControlVariateClient("all", "II", "fedpvr"), SMALL, Adam(), "fedpvr.option=II"),
        (ControlVariateClient("all", "II-momentum"), SMALL, Adam(), "option=II-momentum"),
        (FedNovaClient(), SMALL, Adam(), "local.optimizer=sgd"),
        (ClientMomentum(), SMALL, HEAVY, "local.momentum=0"),
        (ClientMomentum(), SMALL, Adam(), "local.momentum=0"),
        (FedDWClient(), Classifier(), SGD(), "task.head_bias=false"),
        (FedDWClient(), NO_HEAD, SGD(), "NoneType"),
        (
            FedDWClient(),
            nn.ModuleDict({"head": nn.Sequential()}),
            SGD(),
            "Sequential",
        ),
    ],
)
def test_a_side_refuses_the_model_or_the_steps_that_it_does_not_fit(
    side, model, optimizer, message
):
    with refused(*message.split()):
        check_side(side, model, optimizer)


def test_a_side_takes_what_it_fits():
    for layers, option in (("all", "II-momentum"), ("all", "I"), ("none", "II")):
        check_side(ControlVariateClient(layers, option), SMALL, HEAVY)
    check_side(ControlVariateClient(), SMALL, PerFedAvgOptimizer())  # its moves are plain
    check_side(ClientMomentum(), SMALL, SGD(weight_decay=0.1))
    check_side(FedDWClient(), Biasless(), SGD())


@pytest.mark.parametrize("method", [DENSE, Ensemble, PFNM])
def test_a_method_whose_server_runs_the_model_needs_it(method):
    with refused("server_model=ServerModel"):
        method()
