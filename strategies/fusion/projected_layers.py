"""Server half of projections.py: the clients' layers as matrices, with their projections.

Weights are matrices (out, d): a convolution's kernels are flattened, a bias is the last column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Positive, ShareAboveZero
from fedhet.strategies.base import RefusedReplyError, Reply, ServerSide, Shapes, Tensors
from fedhet.strategies.fusion.input_statistics import Spectrum
from fedhet.strategies.fusion.projections import (
    PROJECTIONS,
    SCALES,
    Form,
    ProjectionClient,
    bias_of,
    is_layer,
)
from fedhet.strategies.method import MethodPart
from fedhet.strategies.parts import Parts
from fedhet.strategies.statistics.class_counts import (
    CLASS_COUNTS,
    COUNTS,
    HEAD,
    check_class_counts,
    holder_shares,
)

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
        client = ProjectionClient(
            self.form, self.z, self.damping, self.rank, self.energy, self.sketch_above
        )
        return Parts(
            client_sides={"projections": client},
            server_sides={"projections": ProjectionServer(self.form)},
        )
