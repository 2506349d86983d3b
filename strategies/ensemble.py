"""Ensemble: the mean logits of all clients' models.

A baseline of MA-Echo's paper (Su et al. 2023, Table 1), and the teacher of DENSE (strategies/
dense.py): with l_i(x) (C,) the logits of client i's model,

    l(x)[c] = sum_i share_i[c] l_i(x)[c],        share_i[c] = 1 / N                     (plain)
                                                 share_i[c] = [i holds c] / #{j holds c}  (masked)

The masked form is the default, and the Ensemble of MA-Echo's released code: a model has no say in
classes of which its client has at most one example. A class that no client holds has logit 0.

The ensemble is the round's output model (components/model_outputs.py): accuracy, loss and
model.safetensors are those of all N clients' models. x is FedAvg's, and matters only for a second
round. :func:`ensemble_of` makes a network from the file:

    ensemble_of(load_file("model.safetensors"), model)    # model: the task's, with any weights
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Reads, Reply, Tensors
from fedhet.strategies.method import ONE_SHOT, Method
from fedhet.strategies.parts import Parts
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.statistics.class_counts import CLASS_COUNTS, class_count_parts, holder_shares

SHARES, CLIENTS = "shares", "clients"


class MeanLogits(nn.Module):
    """A network whose logits are the weighted means of many models' logits.

    ``model`` computes with each of the states; its own tensors fill in for missing ones. ``shares``
    are the weight of each model's logit of each class (N, C).
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
    """Return the ensemble of the replies' models, in eval mode."""
    shares = class_shares(replies, network.num_classes, masked=masked).to(network.device)
    states = [network.trained(reply) for reply in replies]
    return MeanLogits(network.model, states, shares).eval()


def require_logits(what: str, network: ServerModel) -> None:
    """Refuse a network that does not classify (``classifies`` is False, as of a CVAE)."""
    if not getattr(network.model, "classifies", True):
        raise ConfigError(
            f"{what} averages logits, and {type(network.model).__name__} has none: choose another "
            "task.model or another strategy"
        )


def class_shares(replies: Sequence[Reply], num_classes: int, *, masked: bool) -> Tensor:
    """Return the weight of each client's logit of each class (N, C)."""
    if not masked:
        return torch.full((len(replies), num_classes), 1.0 / len(replies))
    if any(CLASS_COUNTS not in reply.payloads for reply in replies):
        raise ConfigError(
            "a masked ensemble needs the clients' class counts, but they send none: set "
            "strategy.ensemble.masked=false"
        )
    return holder_shares(replies)


class AllClients:
    """The output model made of all clients' models; its network is :class:`MeanLogits`.

    Its tensors are "shares" (N, C), with rows by client id, and "clients.<id>.<name>"; ``masked``,
    a model has no say in classes that its client does not hold.
    """

    reads = Reads.MODELS

    def __init__(self, masked: bool) -> None:
        self.masked = masked

    def bind(self, network: ServerModel) -> None:
        """Take the network; refuse one without logits."""
        require_logits("strategy=ensemble", network)
        self._network = network

    def __call__(
        self, params: Tensors, update: Tensors, stepped: Tensors, replies: Sequence[Reply]
    ) -> dict[str, Tensor]:
        """Return the models and their shares."""
        found = {SHARES: class_shares(replies, self._network.num_classes, masked=self.masked)}
        for reply in replies:
            for name, value in self._network.trained(reply).items():
                found[f"{CLIENTS}.{reply.client_id}.{name}"] = value
        return found

    def build_model(self, tensors: Tensors) -> MeanLogits:
        """Return the ensemble that the tensors of a round belong to."""
        return ensemble_of(tensors, self._network.model)


def ensemble_of(tensors: Tensors, model: nn.Module) -> MeanLogits:
    """Return the ensemble, in eval mode, of :class:`AllClients`' output or its model.safetensors.

    ``model`` is the task's network, with any weights, on the device to use.
    """
    device = next(model.parameters()).device
    states: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key != SHARES:
            _, client, name = key.split(".", 2)
            states.setdefault(int(client), {})[name] = value.to(device)
    by_client = [states[client] for client in sorted(states)]
    return MeanLogits(model, by_client, tensors[SHARES].to(device)).eval()


class Ensemble(Method):
    """Ensemble (Su et al. 2023): one round; keeps the clients' models and evaluates their mean
    logits. An upper bound of one-shot fusion.
    """

    replaces = frozenset({"output"})
    settings = ONE_SHOT
    requires = MappingProxyType({"strategy.personal": "none", "strategy.output": None})

    masked: bool = True
    """true: a model has no say in classes of which its client has at most one example; false: the
    plain mean of logits, without class counts"""

    def parts(self) -> Parts:
        """Keep all models as the output."""
        counts = class_count_parts() if self.masked else Parts()
        return counts | Parts(output=AllClients(self.masked))
