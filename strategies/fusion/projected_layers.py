"""Layers of many clients with their projections: the server half of projections.py.

Weights are matrices (out, d): a convolution's kernels are flattened, a bias is the last column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from common.errors import ConfigError
from strategies.base import RefusedReplyError, Reply, ServerSide, Tensors
from strategies.fusion.projections import PROJECTIONS, SCALES, Spectrum, is_layer
from strategies.statistics.class_counts import CLASS_COUNTS, HEAD, check_class_counts, holder_shares

_ROUNDING = 1e-3  # what a client's float32 may leave of symmetry, and of eigenvalues up to 1


# ---- a layer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """One layer of all clients.

    Attributes:
        name: of its weight.
        local: W_i (N, out, d); with a bias, [W | b].
        bases: U_i (N, d, r), columns of length 1 or 0, padded with zeros to the largest rank.
        values: p_i (N, r).
        scales: z_i (N,), of the ridge form.
        sizes: n_i (N,).
    """

    name: str
    local: Tensor
    bases: Tensor
    values: Tensor
    scales: Tensor
    sizes: Tensor


def read_layer(
    name: str, local: Tensors, replies: Sequence[Reply], device: torch.device, *, dense: bool
) -> Layer:
    """Return a layer of all clients.

    Args:
        name: of its weight.
        local: the clients' tensors, as of :func:`local_models`.
        replies: with projections.
        device: where the layer goes.
        dense: they are P (d, d), not F (d, r).
    """
    read = spectrum_of_matrix if dense else spectrum_of_factor
    sent = [reply.payloads[PROJECTIONS][name].to(device) for reply in replies]
    scales = torch.stack([reply.payloads[SCALES][name] for reply in replies])
    return Layer(
        name,
        flattened(name, local, batch=1).to(device),
        *stack([read(projection) for projection in sent]),
        scales.to(device),
        torch.tensor([float(reply.num_examples) for reply in replies], device=device),
    )


def projected_layers(replies: Sequence[Reply]) -> list[str]:
    """Return the layers that projections were sent of, but for the classifier."""
    return [name for name in replies[0].payloads[PROJECTIONS] if not name.startswith(f"{HEAD}.")]


def stack(found: Sequence[Spectrum]) -> tuple[Tensor, Tensor]:
    """Return vectors (N, d, r) and values (N, r), padded with zeros to the largest rank."""
    rank = max(len(spectrum.values) for spectrum in found)
    first = found[0].vectors
    bases = first.new_zeros(len(found), len(first), rank)
    values = first.new_zeros(len(found), rank)
    for i, spectrum in enumerate(found):
        held = len(spectrum.values)
        bases[i, :, :held], values[i, :held] = spectrum.vectors, spectrum.values
    return bases, values


def spectrum_of_factor(factor: Tensor) -> Spectrum:
    """Return the eigenvectors (d, r) and eigenvalues (r,) of F F^T.

    Clients send factors with orthogonal columns, which are read as they are; of any other the
    decomposition is computed.
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


def spectrum_of_matrix(matrix: Tensor) -> Spectrum:
    """Return those of P (d, d) that are not rounding."""
    values, vectors = torch.linalg.eigh(matrix.double())
    kept = values > 1e-9
    return Spectrum(vectors[:, kept].to(matrix.dtype), values[kept].to(matrix.dtype))


def local_models(params: Tensors, replies: Sequence[Reply]) -> dict[str, Tensor]:
    """Return the clients' tensors y_i = x + update_i, stacked (N, ...), by name."""
    return {
        name: torch.stack([x + reply.update[name] for reply in replies])
        for name, x in params.items()
    }


def flattened(name: str, tensors: Tensors, batch: int = 0) -> Tensor:
    """Return a layer's weight, and its bias behind it, as a matrix.

    Args:
        name: of the weight.
        tensors: by name.
        batch: how many dimensions stand before those of the weight.
    """
    weight = tensors[name].flatten(batch + 1)
    bias = tensors.get(bias_of(name))
    return weight if bias is None else torch.cat([weight, bias.unsqueeze(-1)], dim=-1)


def unflattened(name: str, matrix: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Return the weight, and the bias if there is one, that a matrix (out, d) holds."""
    found = {}
    if bias_of(name) in like:
        matrix, found[bias_of(name)] = matrix[:, :-1], matrix[:, -1]
    found[name] = matrix.reshape(like[name].shape)
    return found


def bias_of(name: str) -> str:
    """Return the name of the bias that belongs to a weight."""
    return f"{name.removesuffix('weight')}bias"


def masked_classifier(
    params: Tensors, replies: Sequence[Reply], absent: Literal["zero", "keep"] = "zero"
) -> dict[str, Tensor]:
    """Return the classifier whose row of a class is the mean over those that hold it.

    Args:
        params: x.
        replies: with class counts.
        absent: the row of a class that nobody holds: "zero", or x's ("keep").
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
    """Knows what projections must look like, and refuses others.

    Args:
        dense: clients send P (d, d) in place of its factor F (d, r).
    """

    needs = frozenset({PROJECTIONS, SCALES, CLASS_COUNTS})

    def __init__(self, dense: bool = False) -> None:
        self.dense = dense

    def init(self, params: Tensors) -> None:
        """Note the widths of the layers."""
        matrices = [name for name, param in params.items() if is_layer(name, param)]
        self.widths = {name: flattened(name, params).shape[1] for name in matrices}
        classifier = f"{HEAD}.weight"
        if classifier not in params and any(name.startswith("body.") for name in params):
            raise ConfigError(
                f"fusion by projections fuses the classifier, too, but {classifier} stays at the "
                "clients: set strategy.personal so that it is shared (none)"
            )
        # A model without body and head, such as the CVAE, has no classifier to fuse.
        self.classes = len(params[classifier]) if classifier in params else None

    def check(self, reply: Reply) -> None:
        """Refuse projections of other layers, of a wrong shape, or that are none.

        Raises:
            RefusedReplyError: naming the layer and what is wrong.
        """
        sent = reply.payloads[PROJECTIONS]
        if set(sent) != set(self.widths):
            raise RefusedReplyError(
                f"its projections are of {sorted(sent)}, expected {sorted(self.widths)}"
            )
        for name, values in sent.items():
            width, shape = self.widths[name], tuple(values.shape)
            rank = width if self.dense else min(values.shape[-1], width)
            if shape != (width, rank) or rank == 0:
                wanted = f"{(width, width)}" if self.dense else f"({width}, r) with r <= {width}"
                raise RefusedReplyError(f"its projection of {name} is {shape}, expected {wanted}")
            self._check_values(name, values)
        check_class_counts(reply, self.classes)

    def _check_values(self, name: str, values: Tensor) -> None:
        """Refuse what is not symmetric with eigenvalues in [0, 1]; F F^T is symmetric and >= 0."""
        if not self.dense:
            largest = float(spectrum_of_factor(values).values.max())
        else:
            if (values - values.T).abs().max() > _ROUNDING * values.abs().max().clamp_min(1e-30):
                raise RefusedReplyError(f"its projection of {name} is not symmetric")
            eigenvalues = torch.linalg.eigvalsh(values.double())
            largest, smallest = float(eigenvalues[-1]), float(eigenvalues[0])
            if smallest < -_ROUNDING:
                raise RefusedReplyError(
                    f"its projection of {name} has an eigenvalue of {smallest:.2g}, below 0"
                )
        if largest > 1.0 + _ROUNDING:
            raise RefusedReplyError(
                f"its projection of {name} has an eigenvalue of {largest:.3g}, above 1"
            )
