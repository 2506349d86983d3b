"""The model output of PFNM and FedMA: one network of all clients' hidden neurons, matched."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from logging import INFO
from types import MappingProxyType
from typing import Annotated

import torch
from flwr.common.logger import log
from torch import Tensor, nn

from fedhet.common.configured import Key
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Positive, Seed
from fedhet.strategies.base import Reads, Reply, Tensors, local_model
from fedhet.strategies.fusion.layer_chain import Chain, Link, read_chain
from fedhet.strategies.fusion.neuron_matching import Neurons, match
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import class_count_parts, class_counts

GROWN = "grown"
BIAS_MEAN = 0.1


class GrownNetwork(ABC):
    """The network whose hidden neurons are those of all clients, matched.

    ``method`` has its parameters.
    """

    reads = Reads.MODELS

    def __init__(self, method: Matching) -> None:
        self.how = method

    def bind(self, network: ServerModel) -> None:
        """Take the network; refuse one whose layers cannot be matched."""
        params = {name: value.detach() for name, value in network.model.named_parameters()}
        for link in read_chain(params):
            self.check_layer(link, params)
        self._network = network

    def check_layer(self, link: Link, params: Tensors) -> None:
        """Refuse, before round 1, a layer that cannot be matched."""
        if link.followers:
            raise ConfigError(
                f"{link.weight} is followed by normalisation ({', '.join(link.followers)}), which "
                "cannot be matched: choose another task.model (mlp, fedavg_cnn, feddw_cnn, vgg11)"
            )

    @torch.no_grad()
    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return the grown network's tensors."""
        models = [
            {name: value.double() for name, value in local_model(params, reply).items()}
            for reply in replies
        ]
        counts = class_counts(replies).double()
        shares = counts / counts.sum(0).clamp_min(1.0)
        found = self.matched(read_chain(params), models, shares)
        sizes = [len(value) for name, value in found.items() if name.endswith("weight")]
        log(INFO, "%s: layers of %s neurons", type(self).__name__, sizes)
        return {f"{GROWN}.{name}": found[name].float().contiguous() for name in params}

    @abstractmethod
    def matched(
        self, chain: Sequence[Link], models: Sequence[Tensors], shares: Tensor
    ) -> dict[str, Tensor]:
        """Return the global network's tensors by name.

        ``shares`` are each client's shares of the examples of each class (J, C).
        """

    def build_model(self, tensors: Tensors) -> nn.Module:
        """Return the network that the tensors of a round belong to."""
        return grown_network(tensors, self._network.model)

    def match(
        self, link: Link, rows: Sequence[Tensor], bias: int, scales: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return each client's labels, and the global neurons' rows (L, d).

        ``rows`` (n_j, d) are each client's, ``bias`` is the column of the bias, if there is one;
        ``scales`` (J, d) are factors of the precision 1 / sigma, by client and column.
        """
        how, mean = self.how, scales.new_zeros(scales.shape[1])
        if link.has_bias:
            mean[bias] = BIAS_MEAN
        neurons = Neurons(rows, scales / how.sigma, mean, torch.full_like(mean, 1.0 / how.sigma0))
        generator = torch.Generator().manual_seed(how.seed)
        labels = match(neurons, how.gamma, how.max_neurons, how.sweeps, generator)
        sums, totals, _ = neurons.pooled(dict(enumerate(labels)))
        return labels, sums / totals


def grown_network(tensors: Tensors, model: nn.Module) -> nn.Module:
    """Return the network, in eval mode, of :class:`GrownNetwork`'s output or its model.safetensors.

    ``model`` is the task's network, with any weights, on the device to use.
    """
    grown = copy.deepcopy(model)
    for key, value in tensors.items():
        path, _, name = key.removeprefix(f"{GROWN}.").rpartition(".")
        layer = grown.get_submodule(path)
        old = getattr(layer, name)
        setattr(layer, name, nn.Parameter(value.to(old.device), requires_grad=old.requires_grad))
        if name == "weight":
            kind = "channels" if isinstance(layer, nn.Conv2d) else "features"
            outputs, inputs = value.shape[:2]
            setattr(layer, f"out_{kind}", outputs)
            setattr(layer, f"in_{kind}", inputs)
    return grown.eval()


def spread(values: Tensor, labels: Tensor | None, size: int) -> Tensor:
    """Return a client's columns (rows, n, ...) at the positions of the global neurons, else 0.

    Labels (n,) name the global neuron of each column; None: the columns are the global ones'.
    """
    if labels is None:
        return values
    found = values.new_zeros(len(values), size, *values.shape[2:])
    found[:, labels] = values
    return found


class Matching(Method):
    """What PFNM and FedMA share: one round whose output is the grown network of matched neurons."""

    replaces = frozenset({"output"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.personal": "none", "strategy.output": None})

    sigma: Positive = 1.0
    """variance of a client's parameters about the global ones; the smaller, the more neurons"""
    sigma0: Positive = 1.0
    """variance of the global parameters; small ones shrink what few clients have"""
    gamma: Positive = 1.0
    """mass of the process: how readily neurons become new ones"""
    max_neurons: Count = 700
    """neurons that a layer may grow to"""
    sweeps: Count = 5
    """how often every client's neurons are assigned again"""
    seed: Annotated[Seed, Key("seed")] = 0

    def matching_parts(self, network: type[GrownNetwork]) -> Parts:
        """Return the parts of a method whose output is this network."""
        return class_count_parts() | Parts(client_sides={"chain": Chain()}, output=network(self))
