"""PFNM's assignment of clients' neurons to global neurons; equations in strategies/pfnm.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


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
