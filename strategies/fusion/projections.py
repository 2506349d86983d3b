"""The halves of MA-Echo and RegMean: projections onto the inputs of a network's layers.

For a layer y = W x with inputs X (n, d) (input_statistics.py) a client sends F (d, r) with
orthogonal columns; P = F F^T is symmetric with eigenvalues in [0, 1]:

    ridge      P = A (A + z I)^-1,   A = X^T X / n over all the client's examples,
               z in units of the mean eigenvalue of A (MA-Echo, Section 4)
    damped     P = I - N, N <- N - so k k^T / (zeta + x k), k = N x, starting at I, one step for the
               mean x of each mini-batch (MA-Echo's released code; so = 1 is the ridge form over the
               means, so = .5 removes half of each)

F keeps the r eigenvectors that hold ``energy`` of the sum of P's squared eigenvalues, or ``rank``
of them (Table 6). The client also sends each layer's scale z: with it the ridge form gives A back,
A = U diag(z p / (1 - p)) U^T, which RegMean needs. Layers wider than ``sketch_above`` have A
sketched in one pass, without a d x d matrix.

At the server weights are matrices (out, d): a convolution's kernels are flattened, a bias is the
last column.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Positive, ShareAboveZero
from fedhet.strategies.base import (
    ClientSide,
    LocalContext,
    LocalOptimizer,
    LocalSummary,
    Payloads,
    RefusedReplyError,
    Reply,
    ServerSide,
    Shapes,
    Tensors,
)
from fedhet.strategies.components.tensor_selection import require_output_by_class
from fedhet.strategies.fusion.input_statistics import (
    DampedProjector,
    SecondMoment,
    SketchedMoment,
    Spectrum,
    layers_of,
    mean_rows,
    numeric_padding,
    rows_of,
    width_of,
)
from fedhet.strategies.method import MethodPart
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_counts import (
    CLASS_COUNTS,
    COUNTS,
    HEAD,
    check_class_counts,
    counted,
    holder_shares,
)

PROJECTIONS, SCALES = "projections", "projection_scales"

Form = Literal["ridge", "damped"]
Statistic = SecondMoment | SketchedMoment | DampedProjector


def bias_of(name: str) -> str:
    """Return the name of the bias that belongs to a weight."""
    return f"{name.removesuffix('weight')}bias"


def is_layer(name: str, param: Tensor) -> bool:
    """Return whether a tensor looks like a layer's weight, by its name and shape alone."""
    return name.endswith("weight") and param.dim() in (2, 4)


class ProjectionClient(ClientSide):
    """Sends the projection factors of its layers and its class counts after local training."""

    sends, counts = frozenset({PROJECTIONS, SCALES, CLASS_COUNTS}), frozenset({COUNTS})
    by_class = True

    def __init__(self, how: Projections) -> None:
        self.how = how

    def check(self, model: nn.Module, optimizer: LocalOptimizer, shared: Sequence[str]) -> None:
        """Refuse one output for two classes, embeddings, grouped convolutions, and wide layers that
        cannot be sketched.
        """
        require_output_by_class(model)
        layers = layers_of(model)
        for name, param in model.named_parameters():
            if is_layer(name, param) and name not in layers:
                raise ConfigError(
                    "projections need linear or convolutional layers, and "
                    f"{name} belongs to another kind of layer: choose another task.model"
                )
        ranks = self.ranks(list(layers))
        for name, module in layers.items():
            if name in shared and module.bias is not None and bias_of(name) not in shared:
                raise ConfigError(
                    f"projections need {name} together with its bias, and {bias_of(name)} is not "
                    "trained, or stays at the client: train and share both, or neither"
                )
            if isinstance(module, nn.Conv2d):
                numeric_padding(module)
                if module.groups > 1:
                    raise ConfigError(
                        f"{name} has {module.groups} groups, and projections are for convolutions "
                        "without groups: choose another task.model"
                    )
            width = width_of(module)
            if width > self.how.sketch_above and (self.how.form == "damped" or ranks[name] is None):
                raise ConfigError(
                    f"{name} has {width} inputs, more than strategy.projections.sketch_above="
                    f"{self.how.sketch_above}, and a sketch needs form=ridge and a rank: set "
                    "strategy.projections.rank, or raise sketch_above (memory: d x d numbers)"
                )

    def ranks(self, layers: Sequence[str]) -> dict[str, int | None]:
        """Return r of each layer, None where ``energy`` decides; refuse lists of other lengths."""
        rank = self.how.rank
        if not isinstance(rank, Sequence):
            return dict.fromkeys(layers, rank)
        if len(rank) != len(layers):
            raise ConfigError(
                f"strategy.projections.rank={list(rank)} has {len(rank)} numbers, but the model "
                f"has {len(layers)} layers ({', '.join(layers)}): give one for each, or a single "
                "number"
            )
        return dict(zip(layers, rank, strict=True))

    @torch.no_grad()
    def end(self, context: LocalContext, summary: LocalSummary) -> Payloads:
        """Pass over the examples once; return factors, scales and class counts."""
        context.model.eval()
        layers = layers_of(context.model)
        ranks = self.ranks(list(layers))
        # personal layers stay at the client and are not fused
        layers = {name: module for name, module in layers.items() if name in context.anchor}
        statistics = {
            module: self._statistic(module, ranks[name], context) for name, module in layers.items()
        }
        damped = self.how.form == "damped"
        take = mean_rows if damped else rows_of
        batch, order = (64, context.generator) if damped else (500, None)

        def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            statistics[module].add(take(module, inputs[0].float()))

        with ExitStack() as hooks:
            for module in layers.values():
                hooks.enter_context(module.register_forward_pre_hook(record))
            for inputs, _ in context.data.batches(batch, generator=order, train=False):
                context.model(inputs)
        factors, scales = {}, {}
        for name, module in layers.items():
            factors[name], scales[name] = self._projection(statistics[module], ranks[name])
        return {PROJECTIONS: factors, SCALES: scales, **counted(context)}

    def _statistic(self, module: nn.Module, rank: int | None, context: LocalContext) -> Statistic:
        width, device = width_of(module), next(iter(context.params.values())).device
        if self.how.form == "damped":
            # zeta of the released code: its lambda = .8 as exponent of 1e-5 and .01
            zeta = 1e-5**0.8 if isinstance(module, nn.Conv2d) else 0.01**0.8
            return DampedProjector(width, self.how.damping, zeta, device)
        if width > self.how.sketch_above:
            assert rank is not None
            return SketchedMoment(width, 2 * rank, context.generator, device)
        return SecondMoment(width, device)

    def _projection(self, statistic: Statistic, rank: int | None) -> tuple[Tensor, Tensor]:
        """Return F and the scale z (a scalar; 0 of the damped form)."""
        found, scale = statistic.spectrum(), torch.zeros(())
        if not isinstance(statistic, DampedProjector):
            scale = self.how.z * statistic.mean_eigenvalue()
            scale = scale.clamp_min(torch.finfo(torch.float32).tiny)
            found = Spectrum(found.vectors, found.values / (found.values + scale))
        return found.factor(rank, self.how.energy), scale.float()


_ROUNDING = 1e-3  # tolerated in eigenvalues: clients compute in float32


@dataclass(frozen=True)
class Layer:
    """One layer of all clients."""

    name: str  # of its weight
    local: Tensor  # W_i (N, out, d); with a bias, [W | b]
    bases: Tensor  # U_i (N, d, r), padded with zero columns to the largest rank
    values: Tensor  # p_i (N, r)
    scales: Tensor  # z_i (N,), of the ridge form
    sizes: Tensor  # n_i (N,)


def read_layer(name: str, local: Tensors, replies: Sequence[Reply], device: torch.device) -> Layer:
    """Return the layer of that weight, of :func:`local_models` and the replies' projections."""
    spectra = [spectrum_of(reply.payloads[PROJECTIONS][name].to(device)) for reply in replies]
    bases = pad_sequence([spectrum.vectors.T for spectrum in spectra], batch_first=True)
    weights = flattened(name, local, batch=1).to(device)
    dtype = torch.promote_types(weights.dtype, bases.dtype)  # float32 of a model in float16
    bases = bases.to(dtype)
    return Layer(
        name,
        weights.to(dtype),
        bases.mT.contiguous(),
        pad_sequence([spectrum.values for spectrum in spectra], batch_first=True).to(dtype),
        torch.stack([reply.payloads[SCALES][name] for reply in replies]).to(device),
        torch.tensor([float(reply.num_examples) for reply in replies], device=device),
    )


def projected_layers(replies: Sequence[Reply]) -> list[str]:
    """Return the layers with projections, without the classifier."""
    return [name for name in replies[0].payloads[PROJECTIONS] if not name.startswith(f"{HEAD}.")]


def spectrum_of(factor: Tensor) -> Spectrum:
    """Return the eigenvectors (d, r) and eigenvalues (r,) of F F^T.

    Clients send orthogonal columns, so usually they only need scaling to length 1.
    """
    gram = factor.T @ factor
    values = gram.diagonal()
    crossed = (gram - torch.diag(values)).abs().max()
    if crossed <= 1e-5 * values.max():
        return Spectrum(factor / values.sqrt().clamp_min(1e-30), values)
    exact = factor.double()
    squares, rotation = torch.linalg.eigh(exact.T @ exact)
    kept = squares > 1e-12 * squares.max()
    vectors = exact @ rotation[:, kept] / squares[kept].sqrt()
    return Spectrum(vectors.to(factor.dtype), squares[kept].to(factor.dtype))


def local_models(params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
    """Return the clients' tensors y_i = x + update_i, stacked (N, ...), by name."""
    return {
        name: torch.stack([x + reply.update[name] for reply in replies])
        for name, x in params.items()
    }


def flattened(name: str, tensors: Tensors, batch: int = 0) -> Tensor:
    """Return [W | b] of a layer, or W where it has no bias, after ``batch`` leading dimensions."""
    weight = tensors[name].flatten(batch + 1)
    bias = tensors.get(bias_of(name))
    return weight if bias is None else torch.cat([weight, bias.unsqueeze(-1)], dim=-1)


def unflattened(name: str, matrix: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Return the weight and, if there is one, the bias from a matrix (out, d)."""
    found = {}
    if bias_of(name) in like:
        matrix, found[bias_of(name)] = matrix[:, :-1], matrix[:, -1]
    found[name] = matrix.reshape(like[name].shape)
    found = {name: value.to(like[name].dtype) for name, value in found.items()}
    return found


def masked_classifier(
    params: Tensors, replies: Sequence[Reply], absent: Literal["zero", "keep"] = "zero"
) -> dict[str, Tensor]:
    """Return the classifier; its row of a class is the mean over the clients that hold it.

    The row of a class that no client holds is 0, or with absent="keep" that of x, ``params``.
    """
    shares = holder_shares(replies)
    nobody = shares.sum(0) == 0
    head = {name: x for name, x in params.items() if name.startswith(f"{HEAD}.")}
    found = {}
    for name, rows in local_models(head, replies).items():
        mean = torch.einsum("nc,nc...->c...", shares.to(rows.dtype), rows)
        if absent == "keep":
            mean[nobody] = head[name][nobody]
        found[name] = mean
    return found


class ProjectionServer(ServerSide):
    """Refuses replies whose projections cannot be used; ``form`` is the client half's."""

    needs = frozenset({PROJECTIONS, SCALES, CLASS_COUNTS})

    def __init__(self, form: Form) -> None:
        self.form = form

    def init(self, params: Tensors) -> None:
        """Note the widths of the layers."""
        matrices = [name for name, param in params.items() if is_layer(name, param)]
        self.widths = {name: flattened(name, params).shape[1] for name in matrices}
        classifier = f"{HEAD}.weight"
        if classifier not in params and any(name.startswith("body.") for name in params):
            raise ConfigError(
                f"fusion by projections needs the classifier, but {classifier} stays at the "
                "clients: set strategy.personal=none"
            )
        # A model without body and head, such as the CVAE, has no classifier to fuse.
        self.classes = len(params[classifier]) if classifier in params else None

    def expected(self) -> Shapes:
        """Factors (d, r) and a scale () of every layer, class counts (C,)."""
        return {
            PROJECTIONS: {name: (width, None) for name, width in self.widths.items()},
            SCALES: dict.fromkeys(self.widths, ()),
            CLASS_COUNTS: {COUNTS: (self.classes,)},
        }

    def check(self, reply: Reply) -> None:
        """Refuse projections of more columns than rows, wrong eigenvalues and wrong scales."""
        for name, values in reply.payloads[PROJECTIONS].items():
            width, shape = self.widths[name], tuple(values.shape)
            if not 1 <= shape[1] <= width:
                raise RefusedReplyError(
                    f"its projection of {name} is {shape}, expected ({width}, r) with r <= {width}"
                )
            largest = float(spectrum_of(values).values.max())
            if largest > 1.0 + _ROUNDING:
                raise RefusedReplyError(
                    f"its projection of {name} has an eigenvalue of {largest:.3g}, above 1"
                )
        ridge = self.form == "ridge"
        for name, scale in reply.payloads[SCALES].items():
            if not (scale > 0.0 if ridge else scale == 0.0):
                raise RefusedReplyError(
                    f"its {SCALES} of {name} is {float(scale):.3g}: with "
                    f"strategy.projections.form={self.form} it is {'above 0' if ridge else '0'}"
                )
        check_class_counts(reply, self.classes)


class Projections(MethodPart):
    """Projections onto the inputs of every layer, and class counts."""

    name = "projections"

    form: Form = "ridge"
    """ridge (A (A + z I)^-1 of all examples) | damped (the released recursion over means of
    mini-batches)"""
    z: Positive = 1.0
    """ridge: in units of A's mean eigenvalue"""
    damping: ShareAboveZero = 0.5
    """damped: how much of a direction a step removes"""
    rank: Count | list[Count | None] | None = None
    """r, columns of a factor, or a list with one number for each layer, from the inputs to the
    classifier; null: as many as `energy` needs"""
    energy: ShareAboveZero = 1.0
    """share of the squared eigenvalues of P to keep"""
    sketch_above: Count = 2304
    """layers with more inputs are sketched (ridge, with a rank): no d x d matrix"""

    def parts(self) -> Parts:
        """Add the two halves."""
        return Parts(
            client_sides={"projections": ProjectionClient(self)},
            server_sides={"projections": ProjectionServer(self.form)},
        )
