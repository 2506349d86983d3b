"""PFNM: probabilistic federated neural matching.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni. ICML 2019. https://arxiv.org/abs/1905.12022

A client's hidden neurons are seen as noisy copies of some of a global network's neurons: which, is
drawn from a Beta-Bernoulli process of mass gamma over the J clients, a global neuron's weights from
N(mu0, sigma0), a client's copy of it from N(it, sigma). The most likely assignment is found client
by client: given the global neurons i that the others' neurons are assigned to, their sums and
precisions

    S_i = 1 / sigma0 + sum_j 1 / sigma,   g_i = mu0 / sigma0 + sum_j w_j / sigma

(over the neurons assigned to i), a client's neuron w goes to the i, or becomes the k-th new global
neuron, for which in total (Hungarian algorithm)

    ||w / sigma + g_i||^2 / (1 / sigma + S_i) - ||g_i||^2 / S_i + log(m_i / (J - m_i))
    ||w / sigma + mu0 / sigma0||^2 / (1 / sigma + 1 / sigma0) - ||mu0 / sigma0||^2 sigma0
        + 2 log(gamma / J) - 2 log k

is largest, m_i the clients that have i, counted to 10 (as in the released code, which doubles the
second logarithms only). Rows that are equal gain nothing in the norms by being one: then gamma
decides. Clients are placed one after the other, and again, in random order, for a number of sweeps.
The global neuron is g_i / S_i; sigma = sigma0 halves what one client alone has. So the network
grows, a layer to at most ``most`` neurons.

Layers are matched from the top: a neuron is its bias and its outgoing weights, as the neurons of
the layer above are matched already; 0 to those of them that its client has no copy of. Only in the
first layer its incoming weights belong to it, too. Weights to a class have the precision 1 / sigma
times the client's share of the class's examples, and so does the classifier's bias. Biases have
mu0 = .1, all else 0. Linear layers only; for convolutions see strategies/fedma.py.

As the network that comes out is larger than the clients', it is not x but an output
(model_outputs.py): the grown network is what the round gives out, is evaluated and stored,
with tensors named "grown.<name>"; :func:`grown_network` makes a network of the file again. x is
FedAvg's, and matters where there is a second round (the paper's several rounds are not built).

Measured on the four-layer perceptron of MA-Echo (MNIST, one seed; % on the test set), it is the
growth that matters, and the released code's numbers (sigma = sigma0 = gamma = 1) hardly grow:

                                      golden case    N = 2, beta = .01     .5            20
                                      (N = 5)        other / same start    o / s         o / s
    plain mean                        18.7           22.4 / 64.8           82.2 / 69.7   52.9 / 96.5
    PFNM, as released                 10.2           59.2 / 35.0           75.6 / 71.4   94.1 / 96.5
    PFNM, sigma .1, sigma0 10, gamma 50   40.7       88.6 / 86.3           80.0 / 74.8   96.3 / 96.3

where the last has 700-348-176 neurons on the golden case and about 660-260-125 of two clients, in
place of 400-200-100; MA-Echo's Table 4 reports 26 / 35, 54 / 89, 65 / 96 for N = 2.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from typing import Unpack

import torch
from flwr.common.logger import log
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from common.errors import ConfigError, require_range, require_whole
from strategies.base import Reply, Tensors, local_model
from strategies.fusion.layer_chain import Chain, Link, read_chain
from strategies.fusion.projected_layers import bias_of, flattened
from strategies.round.federated import FederatedStrategy, Slots
from strategies.round.server_model import ServerModel
from strategies.statistics.class_counts import ClassCountsClient, ClassCountsServer, class_counts

GROWN = "grown"
BIAS_MEAN = 0.1


# ---- the assignment ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copies:
    """What is matched: rows of numbers, one for each neuron of each client.

    Attributes:
        rows: of each client (n_j, d).
        precisions: of each client's rows (J, d); 0 where it knows nothing.
        mean: mu0 (d,).
        precision: 1 / sigma0 (d,).
    """

    rows: Sequence[Tensor]
    precisions: Tensor
    mean: Tensor
    precision: Tensor

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
    copies: Copies, gamma: float, most: int, sweeps: int, generator: torch.Generator
) -> list[Tensor]:
    """Return each client's labels (n_j,): which global neuron each of its neurons is a copy of.

    Args:
        copies: of all clients.
        gamma: the mass: how readily neurons become new global ones.
        most: no neuron becomes one where there are that many.
        sweeps: how often clients are placed again.
        generator: draws their order.
    """
    clients = len(copies.rows)
    by_size = sorted(range(clients), key=lambda j: -len(copies.rows[j]))
    labels = {by_size[0]: torch.arange(len(copies.rows[by_size[0]]))}
    order = by_size[1:]
    for _ in range(sweeps):
        order += torch.randperm(clients, generator=generator).tolist()
    for j in order if clients > 1 else []:
        others = _compressed({i: label for i, label in labels.items() if i != j})
        labels = {**others, j: placed(copies, j, others, gamma, most)}
    return [labels[j] for j in range(clients)]


def _compressed(labels: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the labels numbered anew, without those that nobody has."""
    used = torch.unique(torch.cat(list(labels.values())))
    return {j: torch.searchsorted(used, label) for j, label in labels.items()}


def placed(copies: Copies, j: int, others: Mapping[int, Tensor], gamma: float, most: int) -> Tensor:
    """Return the labels of client j (n_j,) that are worth most, given the others'.

    Args:
        copies: of all clients.
        j: the client.
        others: their labels, of which each of 0..L-1 is somebody's.
        gamma: the mass.
        most: of global neurons.
    """
    sums, totals, counts = copies.pooled(others)
    clients, size = len(copies.rows), len(sums)
    precision = copies.precisions[j]
    weighed = copies.rows[j] * precision
    joint = 1.0 / (precision + totals)
    counts = counts.clamp_max(10)
    # ||weighed + g||^2 / joint precision, multiplied out: (n_j, d) by (d, L)
    old = weighed.square() @ joint.T + 2.0 * weighed @ (sums * joint).T
    old += (sums.square() * joint - sums.square() / totals).sum(1)
    old += (counts / (clients - counts)).log()
    prior = copies.mean * copies.precision
    new = ((weighed + prior).square() / (precision + copies.precision)).sum(1)
    new -= (prior.square() / copies.precision).sum()
    room = torch.arange(1, 1 + max(0, min(len(weighed), most - size)))
    new = new[:, None] + 2.0 * (gamma / clients / room.to(new.dtype)).log()
    _, found = linear_sum_assignment(torch.cat([old, new], dim=1).numpy(), maximize=True)
    label = torch.from_numpy(found)
    fresh = label >= size
    label[fresh] = size + torch.arange(int(fresh.sum()))
    return label


# ---- the network that grows ----------------------------------------------------------------------


class GrownNetwork(ABC):
    """An output: the network whose hidden neurons are those of all clients, matched.

    Args:
        key: of the settings.
        sigma: variance of a client's copy about the global weight, > 0.
        sigma0: variance of global weights, > 0.
        gamma: mass of the process, > 0.
        most: neurons that a layer may grow to.
        sweeps: how often clients are placed again.
        seed: of the order in which they are.
    """

    def __init__(
        self,
        key: str,
        sigma: float,
        sigma0: float,
        gamma: float,
        most: int,
        sweeps: int,
        seed: int,
    ) -> None:
        self.sigma = require_range(f"{key}.sigma", sigma, open_low=True)
        self.sigma0 = require_range(f"{key}.sigma0", sigma0, open_low=True)
        self.gamma = require_range(f"{key}.gamma", gamma, open_low=True)
        self.most = require_whole(f"{key}.most", most, low=1)
        self.sweeps = require_whole(f"{key}.sweeps", sweeps)
        self.seed = seed

    def bind(self, network: ServerModel) -> None:
        """Take the network.

        Raises:
            ConfigError: if its layers cannot be matched.
        """
        params = {name: value.detach() for name, value in network.model.named_parameters()}
        for link in read_chain(params):
            self.check_layer(link, params)
        self._network = network

    def check_layer(self, link: Link, params: Tensors) -> None:
        """Refuse, before round 1, a layer that cannot be matched."""
        if link.followers:
            raise ConfigError(
                f"{link.weight} is normalised ({', '.join(link.followers)}), and matching is for "
                "networks without: choose another task.model (mlp, fedavg_cnn, feddw_cnn, vgg11)"
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

        Args:
            chain: the layers.
            models: of the clients.
            shares: each client's share of the examples of each class (J, C).
        """

    def build_model(self, tensors: Tensors) -> nn.Module:
        """Return the network that was given out."""
        return grown_network(tensors, self._network.model)

    def match(
        self, link: Link, rows: Sequence[Tensor], bias: int, scales: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Return each client's labels, and the global neurons' rows (L, d).

        Args:
            link: the layer.
            rows: of each client (n_j, d).
            bias: the column that the bias stands in, if the layer has one.
            scales: what the precision 1 / sigma is multiplied with, by client and column (J, d).
        """
        mean = scales.new_zeros(scales.shape[1])
        if link.has_bias:
            mean[bias] = BIAS_MEAN
        copies = Copies(rows, scales / self.sigma, mean, torch.full_like(mean, 1.0 / self.sigma0))
        generator = torch.Generator().manual_seed(self.seed)
        labels = match(copies, self.gamma, self.most, self.sweeps, generator)
        sums, totals, _ = copies.pooled(dict(enumerate(labels)))
        return labels, sums / totals


def grown_network(tensors: Tensors, model: nn.Module) -> nn.Module:
    """Return the network, in eval mode, that :class:`GrownNetwork` gave out.

    Args:
        tensors: what it gave out, or the contents of its model.safetensors.
        model: the task's network, of any numbers, on the device that is to compute.
    """
    grown = copy.deepcopy(model)
    for key, value in tensors.items():
        path, _, name = key.removeprefix(f"{GROWN}.").rpartition(".")
        layer = grown.get_submodule(path)
        old = getattr(layer, name)
        setattr(layer, name, nn.Parameter(value.to(old.device), requires_grad=old.requires_grad))
        if name == "weight":  # what a layer says of itself
            outputs, inputs = value.shape[:2]
            convolutional = isinstance(layer, nn.Conv2d)
            kind = "channels" if convolutional else "features"
            setattr(layer, f"out_{kind}", outputs)
            setattr(layer, f"in_{kind}", inputs)
    return grown.eval()


def patched(values: Tensor, labels: Tensor | None, size: int) -> Tensor:
    """Return a client's columns where the global neurons have theirs, and 0 at those it has not.

    Args:
        values: (rows, n, ...), for each of a client's n neurons.
        labels: of those neurons (n,); None: they are the global ones.
        size: how many global neurons there are.
    """
    if labels is None:
        return values
    spread = values.new_zeros(len(values), size, *values.shape[2:])
    spread[:, labels] = values
    return spread


# ---- PFNM ----------------------------------------------------------------------------------------


class NeuralMatching(GrownNetwork):
    """PFNM's output; the arguments are those of :class:`GrownNetwork`."""

    def __init__(
        self,
        sigma: float = 1.0,
        sigma0: float = 1.0,
        gamma: float = 1.0,
        most: int = 700,
        sweeps: int = 5,
        seed: int = 0,
    ) -> None:
        super().__init__("strategy.pfnm", sigma, sigma0, gamma, most, sweeps, seed)

    def check_layer(self, link: Link, params: Tensors) -> None:
        """Refuse convolutions, too."""
        super().check_layer(link, params)
        if params[link.weight].dim() != 2:
            raise ConfigError(
                f"{link.weight} is a convolution, and PFNM matches linear layers: choose "
                "strategy=fedma, or task.model=mlp"
            )

    def matched(
        self, chain: Sequence[Link], models: Sequence[Tensors], shares: Tensor
    ) -> dict[str, Tensor]:
        """Match from the last hidden layer down to the first."""
        head = chain[-1]
        found = self._head_bias(head, models, shares)
        above: list[Tensor | None] = [None] * len(models)
        scales = shares
        for link, upper in reversed(list(itertools.pairwise(chain))):
            own = [_own_weights(link, model, first=link is chain[0]) for model in models]
            rows = [
                torch.cat([mine, patched(model[upper.weight].T, labels, scales.shape[1])], dim=1)
                for mine, model, labels in zip(own, models, above, strict=True)
            ]
            width = own[0].shape[1]
            scales = torch.cat([scales.new_ones(len(models), width), scales], dim=1)
            labels, neurons = self.match(link, rows, width - 1, scales)
            found[upper.weight] = neurons[:, width:].T
            found |= _own_tensors(link, neurons[:, :width], first=link is chain[0])
            above, scales = list(labels), scales.new_ones(len(models), len(neurons))
        return found

    def _head_bias(
        self, head: Link, models: Sequence[Tensors], shares: Tensor
    ) -> dict[str, Tensor]:
        if not head.has_bias:
            return {}
        name = bias_of(head.weight)
        biases = torch.stack([model[name] for model in models])
        total = (shares * biases).sum(0) / self.sigma + BIAS_MEAN / self.sigma0
        return {name: total / (shares.sum(0) / self.sigma + 1.0 / self.sigma0)}


def _own_weights(link: Link, model: Tensors, *, first: bool) -> Tensor:
    """Return what is a layer's neurons' own (n, ...): the bias, in the first layer all incoming."""
    matrix = flattened(link.weight, model)
    return matrix if first else matrix[:, matrix.shape[1] - link.has_bias :]


def _own_tensors(link: Link, own: Tensor, *, first: bool) -> dict[str, Tensor]:
    """Return the tensors that :func:`_own_weights` took."""
    found = {bias_of(link.weight): own[:, -1]} if link.has_bias else {}
    if first:
        found[link.weight] = own[:, : own.shape[1] - link.has_bias]
    return found


class PFNM(FederatedStrategy):
    """One round whose output is the grown network; takes ``server_model=ServerModel(...)``.

    Args:
        output: :class:`NeuralMatching`; by default with the released code's numbers.
        slots: of :class:`FederatedStrategy`; ``server_model`` is required.
    """

    def __init__(self, **slots: Unpack[Slots]) -> None:
        slots.setdefault("output", NeuralMatching())
        super().__init__(
            client_sides={"chain": Chain(), "class_counts": ClassCountsClient()},
            server_sides={"class_counts": ClassCountsServer()},
            **slots,
        )
