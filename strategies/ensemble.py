"""Ensemble: the clients' models, all of them, answering together.

What MA-Echo's paper holds its fused models against (Su et al. 2023, Table 1), and what DENSE
distils (strategies/dense.py): with l_i(x) (C,) the logits of client i's model,

    l(x)[c] = sum_i share_i[c] l_i(x)[c],        share_i[c] = 1 / N                     (plain)
                                                 share_i[c] = [i holds c] / #{j holds c}  (masked)

The masked one is what MA-Echo's released code calls Ensemble, and the default: a model says nothing
of a class that its client has no more than one example of, of which it knows only that it is none
of its own. A class that nobody holds has logit 0. On the golden case (MNIST, 5 clients, Dirichlet
.01; % on the test set) masked is 80.04 in the authors' log and 81.19 here, plain 35.0 in facts 1.9
and 31.33 here; a model alone is right on what its client has, 10 to 30.

It is an output (model_outputs.py): what a round gives out is not x but the clients' models as
they came, N of them, so that accuracy, loss and model.safetensors are the ensemble's. x itself is
FedAvg's, and matters where there is a second round. :func:`ensemble_of` makes a network of the file
again:

    ensemble_of(load_file("model.safetensors"), model)    # model: the task's, of any numbers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.func import functional_call

from common.errors import ConfigError
from strategies.base import Reply, Tensors
from strategies.round.federated import FederatedStrategy, Slots
from strategies.round.server_model import ServerModel
from strategies.statistics.class_counts import (
    CLASS_COUNTS,
    ClassCountsClient,
    ClassCountsServer,
    holder_shares,
)

SHARES, CLIENTS = "shares", "clients"


class MeanLogits(nn.Module):
    """The network whose logits are the weighted means of many models' logits.

    Args:
        model: computes with the states; its own tensors are not used, but where a state lacks one.
        states: the models' tensors, by name.
        shares: the weight of each model's logit of each class (N, C).
    """

    shares: Tensor

    def __init__(self, model: nn.Module, states: Sequence[Tensors], shares: Tensor) -> None:
        super().__init__()
        self.model = model
        self.states = list(states)
        self.register_buffer("shares", shares)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features (B, N, d), those of every model, and logits (B, C)."""
        answers = [functional_call(self.model, dict(state), (inputs,)) for state in self.states]
        features = torch.stack([features for features, _ in answers], dim=1)
        logits = torch.stack([logits for _, logits in answers], dim=1)
        return features, (logits * self.shares).sum(1)


def mean_logits(network: ServerModel, replies: Sequence[Reply], *, masked: bool) -> MeanLogits:
    """Return the ensemble of the replies' models, in eval mode.

    Args:
        network: of the task.
        replies: with class counts if ``masked``.
        masked: a model says nothing of the classes that its client does not hold.
    """
    shares = class_shares(replies, network.num_classes, masked=masked).to(network.device)
    states = [network.trained(reply) for reply in replies]
    return MeanLogits(network.model, states, shares).eval()


def require_logits(what: str, network: ServerModel) -> None:
    """Refuse a network that does not classify (``classifies`` is False, as of a CVAE).

    Raises:
        ConfigError: naming ``what`` takes means of logits.
    """
    if not getattr(network.model, "classifies", True):
        raise ConfigError(
            f"{what} takes means of logits, and {type(network.model).__name__} has none: choose "
            "another task.model, or another strategy"
        )


def class_shares(replies: Sequence[Reply], num_classes: int, *, masked: bool) -> Tensor:
    """Return what each client's logit of each class weighs (N, C).

    Raises:
        ConfigError: if the clients' class counts are needed, and were not sent.
    """
    if not masked:
        return torch.full((len(replies), num_classes), 1.0 / len(replies))
    if any(CLASS_COUNTS not in reply.payloads for reply in replies):
        raise ConfigError(
            "a masked ensemble needs the clients' class counts, and they send none: let the client "
            "side class_counts send them (strategy.class_counts.sent=true), or set masked to false"
        )
    return holder_shares(replies)


class AllClients:
    """The output of all clients' models; their network is :class:`MeanLogits`.

    What it gives out is named "shares" (N, C), its rows by client id, and "clients.<id>.<name>".

    Args:
        masked: a model says nothing of the classes that its client does not hold.
    """

    def __init__(self, masked: bool = True) -> None:
        self.masked = masked

    def bind(self, network: ServerModel) -> None:
        """Take the network.

        Raises:
            ConfigError: if it has no logits.
        """
        require_logits("strategy=ensemble", network)
        self._network = network

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return the models and their shares."""
        shares = class_shares(replies, self._network.num_classes, masked=self.masked)
        found = {SHARES: shares}
        for reply in replies:
            for name, value in self._network.trained(reply).items():
                found[f"{CLIENTS}.{reply.client_id}.{name}"] = value
        return found

    def build_model(self, tensors: Tensors) -> MeanLogits:
        """Return the ensemble that was given out."""
        return ensemble_of(tensors, self._network.model)


def ensemble_of(tensors: Tensors, model: nn.Module) -> MeanLogits:
    """Return the ensemble, in eval mode, that :class:`AllClients` gave out.

    Args:
        tensors: what it gave out, or the contents of its model.safetensors.
        model: the task's network, of any numbers, on the device that is to compute.
    """
    device = next(model.parameters()).device
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key != SHARES:
            _, client, name = key.split(".", 2)
            states.setdefault(int(client), {})[name] = value.to(device)
    by_client = [states[client] for client in sorted(states)]
    return MeanLogits(model, by_client, tensors[SHARES].to(device)).eval()


class Ensemble(FederatedStrategy):
    """One round whose replies answer together; takes ``server_model=ServerModel(...)``.

    Args:
        masked: a model says nothing of the classes that its client does not hold.
        slots: of :class:`FederatedStrategy`; ``server_model`` is required.
    """

    def __init__(self, masked: bool = True, **slots: Unpack[Slots]) -> None:
        slots.setdefault("output", AllClients(masked))
        super().__init__(
            client_sides={"class_counts": ClassCountsClient(masked)},
            server_sides={"class_counts": ClassCountsServer(masked)},
            **slots,
        )
