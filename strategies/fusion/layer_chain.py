"""Networks whose hidden neurons can be matched one by one: chains of layers.

In a chain each linear or convolutional layer is fed by the layer before it and by nothing else, so
a hidden layer's neurons (a convolution's channels) can be permuted together with the next layer's
columns without changing the network's outputs. Everything between two layers must treat all neurons
alike: activations, pooling, dropout, flattening, normalisation by channel or over all channels.
Shortcuts, grouped convolutions and normalisation over groups of channels are refused. The last
layer's outputs keep their places: it is the classifier or, for a model without one (a CVAE), the
last layer of the part that the model names ``fused``.

A layer is a matrix (out, d), its bias, if any, as the last column. The other columns come in
blocks, one block for each neuron of the layer before: one column for a linear layer, the kernel's
positions for a convolution, the image's pixels behind a flattened convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedhet.common.errors import ConfigError
from fedhet.strategies.base import ClientSide, LocalOptimizer, ServerSide, Tensors
from fedhet.strategies.fusion.projections import bias_of, flattened, unflattened
from fedhet.strategies.statistics.class_counts import HEAD

_LAYERS = (nn.Linear, nn.Conv2d)
_ALIKE = (  # modules that treat all neurons alike
    *(nn.Identity, nn.Flatten, nn.Dropout, nn.Dropout2d),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
_ALIKE_CALLS = (
    *(torch.relu, torch.tanh, torch.sigmoid, torch.flatten, F.relu, F.dropout),
    *(F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d, "relu", "tanh", "sigmoid", "flatten"),
)


@dataclass(frozen=True)
class Link:
    """A layer of a chain."""

    weight: str  # its name
    block: int  # columns for each neuron of the layer before it; 0 for the first layer
    has_bias: bool
    followers: list[str] = field(default_factory=list)  # normalisation: a number per neuron

    def columns(self, order: Tensor | None) -> Tensor | slice:
        """Return the order of the columns when the layer before has its neurons in this order."""
        if order is None:
            return slice(None)
        columns = (order[:, None] * self.block + torch.arange(self.block)).flatten()
        if self.has_bias:
            columns = torch.cat([columns, torch.tensor([len(columns)])])
        return columns


def read_chain(params: Tensors) -> list[Link]:
    """Return the layers in order, the classifier last, from names and shapes alone.

    Raises:
        ConfigError: for tensors that form no chain, or that lack the classifier.
    """
    links: list[Link] = []
    width = 0
    for name, value in params.items():
        if name.endswith("weight") and value.dim() in (2, 4):
            block = _block(name, value, links, width)
            links.append(Link(name, block, bias_of(name) in params))
            width = len(value)
        elif links and name == bias_of(links[-1].weight) and value.shape == (width,):
            continue
        elif links and value.shape == (width,):
            links[-1].followers.append(name)
        else:
            raise _no_chain(f"{name} {tuple(value.shape)} belongs to no layer before it")
    classified = f"{HEAD}.weight" in params or any(name.startswith("body.") for name in params)
    last = links[-1] if links else None
    if last is None or last.followers or (classified and last.weight != f"{HEAD}.weight"):
        raise _no_chain(f"the last shared layer is not {HEAD}.weight (see strategy.personal)")
    return links


def _block(name: str, value: Tensor, links: list[Link], width: int) -> int:
    if not links:
        return 0
    inputs = value.shape[1]
    if inputs != width and (value.dim() == 4 or inputs % width):
        last = links[-1].weight
        raise _no_chain(f"{name} has {inputs} inputs and {last} before it {width} outputs")
    return value[0].numel() // width


def _no_chain(why: str) -> ConfigError:
    return ConfigError(
        f"{why}, but matching needs neurons that can change places: choose a task.model of plain "
        "layers in a row (mlp, fedavg_cnn, feddw_cnn, vgg11)"
    )


def reordered(chain: Sequence[Link], model: Tensors, orders: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return the model with new orders of the neurons (out,) of every layer but the last."""
    found, before = dict(model), None
    for link, order in zip(chain, [*orders, None], strict=True):
        matrix = flattened(link.weight, model)[:, link.columns(before)]
        found |= unflattened(link.weight, matrix if order is None else matrix[order], model)
        if order is not None:
            found |= {name: model[name][order] for name in link.followers}
        before = order
    return found


class Chain(ClientSide):
    """Refuses, before round 1, a model that is not a chain."""

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse an operation that does not treat all neurons alike, by name."""
        part: str = getattr(model, "fused", "")
        network, prefix = model.get_submodule(part), f"{part}." if part else ""
        try:
            graph = fx.symbolic_trace(network).graph
        except Exception as error:  # of any kind, from forward methods given a symbolic tensor
            raise _no_chain(f"{type(model).__name__} cannot be traced by torch.fx") from error
        modules, used = dict(network.named_modules()), []
        for node in graph.nodes:
            if node.op == "output":
                continue
            if len(node.all_input_nodes) > 1:
                raise _no_chain(f"{node.name} has {len(node.all_input_nodes)} inputs")
            if node.op == "call_module":
                if reason := _tie(modules[str(node.target)]):
                    raise _no_chain(f"{node.target} {reason}")
                if isinstance(modules[str(node.target)], _LAYERS):
                    used.append(f"{prefix}{node.target}.weight")
            elif node.op != "placeholder" and node.target not in _ALIKE_CALLS:
                raise _no_chain(f"{node.name} may not treat all neurons alike")
        read = [link.weight for link in read_chain(dict(network.named_parameters(prefix=part)))]
        if used != read:
            raise _no_chain(f"its layers are used in the order {used}, but listed as {read}")


class ChainServer(ServerSide):
    """Refuses shared tensors that do not form a chain with the classifier at its end."""

    def init(self, params: Tensors) -> None:
        """Refuse tensors that form no chain."""
        read_chain(params)


def _tie(module: nn.Module) -> str:
    """Return why the module's neurons cannot change places; empty if they can."""
    if isinstance(module, nn.Conv2d) and module.groups > 1:
        return f"has {module.groups} groups"
    if isinstance(module, nn.GroupNorm):
        some = 1 < module.num_groups < module.num_channels
        return f"normalises over {module.num_groups} groups of channels" if some else ""
    if isinstance(module, nn.BatchNorm2d):
        return "has running statistics" if module.track_running_stats else ""
    return "" if isinstance(module, _LAYERS + _ALIKE) else f"is a {type(module).__name__}"
