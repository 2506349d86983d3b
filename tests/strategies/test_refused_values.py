"""A value out of its range is refused by the name of its key."""

from __future__ import annotations

import re

import pytest

from common.errors import ConfigError
from strategies.components.samplers import BernoulliSampler, FixedSizeSampler
from strategies.components.schedules import MultiStep
from strategies.components.tensor_selection import TensorSelector
from strategies.fedala import FedALAClient
from strategies.fedcm import ClientMomentum
from strategies.feddistill import FedDistillClient
from strategies.feddw import FedDWClient
from strategies.feddyn import FedDynClient, FedDynServer
from strategies.fedexp import ExtrapolatedMean
from strategies.fedmrur import ManifoldRegularizer
from strategies.fedproto import PrototypeClient
from strategies.fedprox import FedProxClient
from strategies.fedsam import SAM
from strategies.feduv import FedUVClient
from strategies.moon import MOONClient
from strategies.per_fedavg import PerFedAvgOptimizer
from strategies.scaffold import ControlVariateClient
from strategies.statistics.soft_labels import SoftLabelServer

WRONG = [
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
    (MOONClient, "strategy.moon", {"mu": [-1.0], "tau": [0.0], "previous": [0]}),
    (PerFedAvgOptimizer, "strategy.per_fedavg", {"alpha": [-1.0], "order": ["second"]}),
    (PerFedAvgOptimizer, "strategy.per_fedavg", {"delta": [0.0]}),
    (ControlVariateClient, "strategy.scaffold", {"option": ["III"]}),
    (SoftLabelServer, "strategy.soft_labels", {"history": ["every"], "absent": ["zero"]}),
    (SoftLabelServer, "strategy.soft_labels", {"smoothing": [1.5]}),
    (FixedSizeSampler, "", {"participation": [0.0, -0.1, 1.1]}),
    (BernoulliSampler, "", {"participation": [0.0, 1.1]}),
    (MultiStep, "schedule", {"milestones": [[0.5, 1.0], [0.0]], "decay": [0.0, 1.5]}),
]
CASES = [
    (part, f"{prefix}.{key}".lstrip("."), {key: value})
    for part, prefix, wrong in WRONG
    for key, values in wrong.items()
    for value in values
]


@pytest.mark.parametrize(("part", "key", "wrong"), CASES, ids=str)
def test_a_value_out_of_range_names_its_key(part, key, wrong):
    [value] = wrong.values()
    with pytest.raises(ConfigError, match=re.escape(f"{key}={value!r}")):
        part(**wrong)


@pytest.mark.parametrize("spec", ["last:0", "last:x", "first:"])
def test_a_malformed_selector_names_its_key_and_the_syntax(spec):
    with pytest.raises(ConfigError, match=rf"local\.x='{spec}'.*last:N"):
        TensorSelector(spec, "local.x")
