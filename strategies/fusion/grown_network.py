"""The model output of PFNM and FedMA: one network of all clients' hidden neurons, matched.

strategies/pfnm.py has the equations of the assignment of clients' neurons to global ones.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from types import MappingProxyType
from typing import Annotated

import torch
from flwr.common.logger import log
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedhet.common.configured import Key
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Positive, Seed
from fedhet.strategies.base import Reads, Reply, Tensors, local_model
from fedhet.strategies.fusion.layer_chain import Chain, Link, read_chain
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


@dataclass(frozen=True)
class Neurons:
    """The clients' neurons as rows of numbers."""

    rows: Sequence[Tensor]  # of each client (n_j, d)
    precisions: Tensor  # of each client's rows (J, d); 0 where it knows nothing
    mean: Tensor  # mu0 (d,)
    precision: Tensor  # 1 / sigma0 (d,)

    def pooled(self, labels: Mapping[int, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return g (L, d), S (L, d) and m (L,) of the global neurons that are labelled 0..L-1."""
        size = 1 + max(int(label.max()) for label in labels.values())
        sums = (self.mean * self.precision).repeat(size, 1)
        totals = self.precision.repeat(size, 1)
        counts = torch.zeros(size, dtype=sums.dtype)
        for j, label in labels.items():
            sums[label] += self.rows[j] * self.precisions[j]  # a client's labels are distinct
            totals[label] += self.precisions[j]
            counts[label] += 1
        return sums, totals, counts


def match(
    neurons: Neurons, gamma: float, max_neurons: int, sweeps: int, generator: torch.Generator
) -> list[Tensor]:
    """Return each client's labels (n_j,): the global neuron of each of its neurons.

    All clients are assigned again in each of the sweeps, in an order that the generator draws.
    """
    clients = len(neurons.rows)
    by_size = sorted(range(clients), key=lambda j: -len(neurons.rows[j]))
    labels = {by_size[0]: torch.arange(len(neurons.rows[by_size[0]]))}
    order = by_size[1:]
    for _ in range(sweeps):
        order += torch.randperm(clients, generator=generator).tolist()
    for j in order if clients > 1 else []:
        others = _compressed({i: label for i, label in labels.items() if i != j})
        labels = {**others, j: assign(neurons, j, others, gamma, max_neurons)}
    return [labels[j] for j in range(clients)]


def _compressed(labels: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the labels renumbered without gaps."""
    used = torch.unique(torch.cat(list(labels.values())))
    return {j: torch.searchsorted(used, label) for j, label in labels.items()}


def assign(
    neurons: Neurons, j: int, others: Mapping[int, Tensor], gamma: float, max_neurons: int
) -> Tensor:
    """Return the most likely labels of client j (n_j,), given the others', 0..L-1 without gaps."""
    sums, totals, counts = neurons.pooled(others)
    clients, size = len(neurons.rows), len(sums)
    precision = neurons.precisions[j]
    weighted = neurons.rows[j] * precision
    joint = 1.0 / (precision + totals)
    counts = counts.clamp_max(10)
    # ||weighted + g||^2 / joint precision, multiplied out: (n_j, d) by (d, L)
    old = weighted.square() @ joint.T + 2.0 * weighted @ (sums * joint).T
    old += (sums.square() * joint - sums.square() / totals).sum(1)
    old += (counts / (clients - counts)).log()
    prior = neurons.mean * neurons.precision
    new = ((weighted + prior).square() / (precision + neurons.precision)).sum(1)
    new -= (prior.square() / neurons.precision).sum()
    room = torch.arange(1, 1 + max(0, min(len(weighted), max_neurons - size)))
    new = new[:, None] + 2.0 * (gamma / clients / room.to(new.dtype)).log()
    _, found = linear_sum_assignment(torch.cat([old, new], dim=1).numpy(), maximize=True)
    label = torch.from_numpy(found)
    fresh = label >= size
    label[fresh] = size + torch.arange(int(fresh.sum()))
    return label
