"""PFNM: probabilistic federated neural matching.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni. ICML 2019. https://arxiv.org/abs/1905.12022

A client's hidden neurons are noisy copies of some of a global network's neurons. The model draws
which ones from a Beta-Bernoulli process of mass gamma over the J clients, a global neuron's weights
from N(mu0, sigma0), and a client's copy of it from N(it, sigma). fusion/grown_network.py finds
the most likely assignment client by client. With the sums and precisions of the global neurons i,
over the other clients' neurons assigned to them,

    S_i = 1 / sigma0 + sum_j 1 / sigma,   g_i = mu0 / sigma0 + sum_j w_j / sigma

a client's neuron w joins an i, or becomes the k-th new global neuron, so that in total (Hungarian
algorithm)

    ||w / sigma + g_i||^2 / (1 / sigma + S_i) - ||g_i||^2 / S_i + log(m_i / (J - m_i))
    ||w / sigma + mu0 / sigma0||^2 / (1 / sigma + 1 / sigma0) - ||mu0 / sigma0||^2 sigma0
        + 2 log(gamma / J) - 2 log k

is largest; m_i is the number of clients that have i, counted to 10 (as in the released code, which
doubles only the second logarithms). Clients are assigned one after the other, then again in random
order for ``sweeps`` sweeps. The global neuron is g_i / S_i; sigma = sigma0 halves a neuron that a
single client has. A layer grows to at most ``max_neurons``.

Layers are matched from the top. A neuron is its bias and its outgoing weights to the matched
neurons above, or 0 to a neuron that its client lacks; in the first layer also its incoming weights.
Weights to a class, and the classifier's bias, have the precision 1 / sigma times
the client's share of the class's examples. Biases have mu0 = .1, all else 0. Linear layers only;
for convolutions see strategies/fedma.py.

The grown network is larger than the clients', so it is not x but the round's output model
(fusion/grown_network.py), with tensors named "grown.<name>". x is FedAvg's, and matters only for a
second round (the paper's several rounds are not built). The released code's sigma = sigma0 = gamma
= 1 hardly let layers grow; for other values see docs/results/maecho.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Tensors
from fedhet.strategies.fusion.grown_network import BIAS_MEAN, GrownNetwork, Matching, spread
from fedhet.strategies.fusion.layer_chain import Link
from fedhet.strategies.fusion.projections import bias_of, flattened
from fedhet.strategies.parts import Parts


class NeuralMatching(GrownNetwork):
    """PFNM's output model."""

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
        head, found, sigma, sigma0 = chain[-1], {}, self.how.sigma, self.how.sigma0
        if head.has_bias:
            name = bias_of(head.weight)
            biases = torch.stack([model[name] for model in models])
            total = (shares * biases).sum(0) / sigma + BIAS_MEAN / sigma0
            found[name] = total / (shares.sum(0) / sigma + 1.0 / sigma0)
        above: list[Tensor | None] = [None] * len(models)
        scales = shares
        for link, upper in reversed(list(itertools.pairwise(chain))):
            # a neuron's own numbers: its bias, in the first layer [W | b]
            own = [flattened(link.weight, model) for model in models]
            if link is not chain[0]:
                own = [matrix[:, matrix.shape[1] - link.has_bias :] for matrix in own]
            rows = [
                torch.cat([mine, spread(model[upper.weight].T, labels, scales.shape[1])], dim=1)
                for mine, model, labels in zip(own, models, above, strict=True)
            ]
            width = own[0].shape[1]
            scales = torch.cat([scales.new_ones(len(models), width), scales], dim=1)
            labels, neurons = self.match(link, rows, width - 1, scales)
            found[upper.weight] = neurons[:, width:].T
            if link.has_bias:
                found[bias_of(link.weight)] = neurons[:, width - 1]
            if link is chain[0]:
                found[link.weight] = neurons[:, : width - link.has_bias]
            above, scales = list(labels), scales.new_ones(len(models), len(neurons))
        return found


class PFNM(Matching):
    """PFNM (Yurochkin et al. 2019): one round; matches the clients' neurons by a Beta-Bernoulli
    process; neurons without a match make the network wider.
    """

    def parts(self) -> Parts:
        """Match the neurons."""
        return self.matching_parts(NeuralMatching)
