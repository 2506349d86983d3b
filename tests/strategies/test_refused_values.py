"""A value that is not allowed is refused by the name of its key."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

import fedhet
from fedhet.common.configured import MISSING, Configured, Field, fields, section_of
from fedhet.common.kinds import choices_of
from fedhet.strategies.afl import AFL
from fedhet.strategies.average import Average
from fedhet.strategies.ccvr import CCVR
from fedhet.strategies.components.local_optimizers import SGD, Adam
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.dbe import DBE
from fedhet.strategies.dense import DENSE
from fedhet.strategies.ensemble import Ensemble
from fedhet.strategies.fedcm import ClientMomentum
from fedhet.strategies.feddistill import FedDistill
from fedhet.strategies.feddw import FedDW
from fedhet.strategies.fednova import FedNova
from fedhet.strategies.fedpvr import FedPVR
from fedhet.strategies.fedrod import FedRoD
from fedhet.strategies.maecho import MAEcho
from fedhet.strategies.method import Method
from fedhet.strategies.modes.private.differential_privacy import CentralAdaptive, CentralFixed
from fedhet.strategies.modes.private.local_privacy import Local
from fedhet.strategies.pfnm import PFNM
from fedhet.strategies.regmean import RegMean
from fedhet.strategies.scaffold import SCAFFOLD
from tests.federation import Regression
from tests.refused import refused
from tests.strategies.labelled import Biasless, Classifier
from tests.strategies.sides import check_side, client_side, parts_of, per_fedavg

PUBLIC = [getattr(fedhet, name) for name in fedhet.__all__]
METHODS = [one for one in PUBLIC if isinstance(one, type) and issubclass(one, Method)]
# methods that read a row of the classifier for each class
BY_ROW = [AFL, Average, CCVR, DBE, Ensemble, FedDistill, FedDW, FedRoD, MAEcho, RegMean]
PRIVACY = [CentralFixed, CentralAdaptive, Local]
# by what is allowed, values that are not
WRONG = {
    "a number above 0": [0.0, -1.0, float("inf"), float("nan"), True, "abc", None],
    "a number of at least 0": [-0.1, float("inf"), "1", None],
    "a number in (0, 1]": [0.0, 1.1, "abc"],
    "a number in (0, 2]": [0.0, 2.5],
    "a number in [0, 1]": [-0.1, 1.5, "abc"],
    "a number in [1e-10, 0.1]": [0.0, 0.5],
    "a whole number of at least 0": [-1, 1.5, True],
    "a whole number of at least 1": [0, 1.5, "abc"],
    "a list, each of it a whole number of at least 1": [4, "abc", [2, 0]],
    "a whole number of at least 1 or a list, each of it a whole number of at least 1 or null": [
        *(0, "abc", [2, 0])
    ],
    "a whole number of at least 2": [1, 2.5],
    "a whole number in [0, 4294967296)": [-1, 2**32, 0.5],
    "true or false": ["maybe", 1, None],
    "none, all, last:N, first:N or name patterns": ["last:0", "last:x", "first:", "", 3],
    "auto, cpu, cuda or cuda:N": ["gpu", "cuda:x", 0],
}


def parameters(kind: type[Configured]) -> Iterator[Field]:
    return (one for one in fields(kind).values() if not (one.in_code or section_of(one)))


def made(kind: type[Configured], **given: Any) -> Configured:
    return kind.unbound(given) if issubclass(kind, Method) else kind(**given)


SECTIONS = sorted(  # the same order in every worker
    {section_of(field) for kind in METHODS for field in fields(kind).values()} - {None},
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", [*METHODS, *SECTIONS, *PRIVACY], ids=lambda kind: kind.__name__)
def test_every_parameter_refuses_what_its_kind_does_not_allow_by_its_key(kind):
    for field in parameters(kind):
        assert field.default is not MISSING, field.name
        made(kind, **{field.name: field.default})
        allowed = field.allowed.removesuffix(" or null")
        wrong = ["nothing", 3, *WRONG["true or false"]]
        wrong = wrong if choices_of(field.annotation) else WRONG[allowed]
        for value in wrong:
            if value is None and allowed != field.allowed:
                continue
            key = field.key or f"{kind.section}.{field.name}"
            with refused(f"{key}="):
                made(kind, **{field.name: value})


def test_an_unknown_parameter_or_a_section_of_another_class_is_refused_by_its_key():
    with refused("strategy.fedpvr.layer", "layers"):
        FedPVR(layer="all")
    with refused("strategy.soft_labels.histry", "history"):
        FedDW(soft_labels={"histry": "all"})
    with refused("strategy.feddw.soft_labels="):
        FedDW(soft_labels=None)


@pytest.mark.parametrize("spec", ["last:0", "last:x", "first:"])
def test_a_malformed_selector_names_its_key(spec):
    with refused(f"local.x='{spec}'"):
        TensorSelector(spec, "local.x")


SMALL, HEAVY = Regression(1), SGD(momentum=0.9)
NO_HEAD = nn.ModuleDict({"last": nn.Linear(2, 2, bias=False)})
MOMENTUM = {"layers": "all", "option": "II-momentum"}


@pytest.mark.parametrize(
    ("side", "model", "optimizer", "named"),
    [
        # option II reads the gradient off plain steps
        (client_side(SCAFFOLD), SMALL, HEAVY, "scaffold.option=II local.optimizer=sgd"),
        (client_side(FedPVR, layers="all"), SMALL, Adam(), "fedpvr.option=II =sgd"),
        (client_side(FedPVR, **MOMENTUM), SMALL, Adam(), "option=II-momentum =sgd"),
        (client_side(FedNova), SMALL, Adam(), "local.optimizer=sgd"),
        (client_side(ClientMomentum), SMALL, HEAVY, "local.momentum=0"),
        (client_side(ClientMomentum), SMALL, Adam(), "local.momentum=0"),
        (client_side(FedDW), Classifier(), SGD(), "task.head_bias=false"),
        (client_side(FedDW), NO_HEAD, SGD(), "NoneType"),
        (client_side(FedDW), nn.ModuleDict({"head": nn.Sequential()}), SGD(), "Sequential"),
    ],
)
def test_a_side_refuses_the_model_or_the_steps_that_it_does_not_fit(side, model, optimizer, named):
    with refused(*named.split()):
        check_side(side, model, optimizer)


@pytest.mark.parametrize("method", BY_ROW, ids=lambda method: method.name)
def test_one_output_for_two_classes_is_refused_by_what_reads_the_classifier_by_class(method):
    model, sides = nn.ModuleDict({"head": nn.Linear(4, 1)}), parts_of(method).client_sides
    with refused("task.model"):
        _ = [check_side(side, model, SGD()) for side in sides.values()]


def test_a_side_takes_what_it_fits():
    for layers, option in (("all", "II-momentum"), ("all", "I"), ("none", "II")):
        check_side(client_side(FedPVR, layers=layers, option=option), SMALL, HEAVY)
    check_side(client_side(SCAFFOLD), SMALL, per_fedavg())  # its moves are plain
    check_side(client_side(ClientMomentum), SMALL, SGD(weight_decay=0.1))
    check_side(client_side(FedDW), Biasless(), SGD())


@pytest.mark.parametrize("method", [DENSE, Ensemble, PFNM])
def test_a_method_whose_server_runs_the_model_needs_it(method):
    with refused("server_model"):
        method()
