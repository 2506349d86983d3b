"""What MA-Echo's iterations compute of a layer, in the cheapest of three ways.

Client i pulls W (out, d) by (W - V_i) P_i, and P_i = F_i F_i^T. The F_i^T of all clients stand
below each other as ``rows`` (R, d), R = sum_i r_i; and so do

    z_i = F_i^T (W - V_i)^T   (r_i, out),    of which pull_i = z_i^T F_i^T   (out, d)

An iteration weighs the pulls, moves W along their sum, and takes that into the z_i, z <- z + rows
move^T. The Gram matrix of the pulls, which eq. 6 needs, is most of the work. It is done

    along the inputs      with pulls and moves (out, d)                        4 out R d operations
    along the directions  with moves in units of the rows, (R, out), and       4 out R R
                          rows rows^T (R, R); the Gram matrix from z z^T
    pull by pull          the same, and what each client's pull does to        2 out R R
                          all z is kept: Gram matrix and new z are read off

and with uniform weights, for which there is no Gram matrix, in the first way or the second, 4 out R
d or 2 out R R. For few directions in all the second is the cheapest, for few clients of many the
third, else the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.fusion.projected_layers import Layer

_NOTHING = 1e-12  # a projection's eigenvalue that is as good as 0


@dataclass(frozen=True)
class Inputs:
    """A layer's inputs; those that no client's projection tells apart are taken as one.

    MNIST's border, black in every image, is such a group of pixels. m equal columns of the rows
    count as one of sqrt(m) times their length: whatever P_i does lies in the span of these.

    Attributes:
        group: to which column each input belongs (d,); None: each has its own.
        scale: 1 / sqrt(m) of each column (D,).
    """

    group: Tensor | None
    scale: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> Inputs:
        """Find the equal columns of rows (R, d): next to each other by their sums."""
        width = rows.shape[1]
        sums = torch.linspace(1.0, 2.0, len(rows), dtype=rows.dtype, device=rows.device) @ rows
        ordered, order = sums.sort()
        near = (ordered.diff() <= 1e-4 * sums.abs().max()).nonzero().flatten()
        apart = (rows[:, order[near + 1]] - rows[:, order[near]]).abs().sum(0)
        new = torch.ones(width, dtype=torch.int64, device=rows.device)
        new[near[apart <= 100 * torch.finfo(rows.dtype).eps] + 1] = 0
        group = torch.empty_like(new)
        group[order] = new.cumsum(0) - 1
        counts = group.bincount()
        return cls(None if len(counts) == width else group, counts.to(rows.dtype).rsqrt())

    def fold(self, matrix: Tensor) -> Tensor:
        """Return a matrix (n, d) on the columns (n, D)."""
        if self.group is None:
            return matrix
        folded = matrix.new_zeros(len(matrix), len(self.scale))
        return folded.index_add_(1, self.group, matrix).mul_(self.scale)

    def unfold(self, matrix: Tensor) -> Tensor:
        """Return a matrix (n, D) on the inputs (n, d)."""
        return matrix if self.group is None else (matrix * self.scale)[:, self.group]


class Span:
    """The directions that clients' projections leave W no freedom in.

    Attributes:
        inputs: what the columns of ``rows`` are.
        rows: the F_i^T below each other (R, D), those of eigenvalue 0 left out.
        values: the eigenvalues (R, 1).
        parts: which rows are whose.
        owners: whose each row is (R,).

    Args:
        layer: of all clients.
        fold: take inputs that are not told apart as one.
    """

    def __init__(self, layer: Layer, *, fold: bool) -> None:
        kept = layer.values > _NOTHING
        self.values = layer.values[kept].unsqueeze(1)
        rows = layer.bases.transpose(1, 2)[kept].mul_(self.values.sqrt())
        self.inputs = Inputs.of(rows) if fold else Inputs(None, rows.new_ones(rows.shape[1]))
        self.rows = self.inputs.fold(rows)
        ranks = kept.sum(1)
        ends = ranks.cumsum(0).tolist()
        self.parts = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        self.owners = torch.arange(len(ranks), device=ranks.device).repeat_interleave(ranks)

    def coordinates(self, apart: Callable[[int], Tensor]) -> Tensor:
        """Return the z_i (R, out) of the matrices (out, d) that ``apart`` gives for each client."""
        return torch.cat(
            [self.rows[p] @ self.inputs.fold(apart(i)).T for i, p in enumerate(self.parts)]
        )


# ---- the three ways ------------------------------------------------------------------------------


class Steps(ABC):
    """Weighs pulls and moves W; ``pulled`` (R, out) are the coordinates of the (W - V_i) P_i.

    A move is in a form of its own, which :meth:`on_inputs` reads; sums of moves are moves.
    """

    def __init__(self, span: Span) -> None:
        self.span = span

    @abstractmethod
    def zero(self, like: Tensor) -> Tensor:
        """Return the move (out, d) that is none."""

    @abstractmethod
    def gram(self, pulled: Tensor) -> Tensor:
        """Return the inner products of the clients' pulls (N, N)."""

    @abstractmethod
    def move(self, pulled: Tensor, shares: Tensor) -> Tensor:
        """Return sum_i shares_i pull_i, as a move; after :meth:`gram` of the same, if at all."""

    @abstractmethod
    def take_in(self, move: Tensor, coordinates: Tensor) -> None:
        """Add to the z_i what the last move does to them."""

    @abstractmethod
    def on_inputs(self, move: Tensor) -> Tensor:
        """Return a move on the inputs as the rows have them (out, D)."""

    @abstractmethod
    def seen(self, move: Tensor) -> Tensor:
        """Return rows move^T (R, out)."""


class AlongInputs(Steps):
    """Moves are (out, D)."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.pulls: Tensor | None = None

    def zero(self, like: Tensor) -> Tensor:
        """Return zeros (out, D)."""
        return like.new_zeros(len(like), self.span.rows.shape[1])

    def gram(self, pulled: Tensor) -> Tensor:
        """Return the inner products; the pulls are kept."""
        if self.pulls is None:
            shape = (len(self.span.parts), pulled.shape[1], self.span.rows.shape[1])
            self.pulls = pulled.new_empty(shape)
        for pull, part in zip(self.pulls, self.span.parts, strict=True):
            torch.mm(pulled[part].T, self.span.rows[part], out=pull)
        flat = self.pulls.flatten(1)
        return flat @ flat.T

    def move(self, pulled: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of the pulls that were kept, or of all at once."""
        if self.pulls is not None:
            return (shares @ self.pulls.flatten(1)).view(self.pulls.shape[1:])
        return (pulled * shares[self.span.owners, None]).T @ self.span.rows

    def take_in(self, move: Tensor, coordinates: Tensor) -> None:
        """Add rows move^T."""
        coordinates.addmm_(self.span.rows, move.T)

    def on_inputs(self, move: Tensor) -> Tensor:
        """Return the move."""
        return move

    def seen(self, move: Tensor) -> Tensor:
        """Return rows move^T (R, out)."""
        return self.span.rows @ move.T


class AlongDirections(Steps):
    """Moves are (R, out), in units of the rows."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.cross = span.rows @ span.rows.T

    def zero(self, like: Tensor) -> Tensor:
        """Return zeros (R, out)."""
        return like.new_zeros(len(self.cross), len(like))

    def gram(self, pulled: Tensor) -> Tensor:
        """Return the blocks' sums of rows rows^T times z z^T, entry by entry."""
        products = self.cross * (pulled @ pulled.T)
        return self._by_client(self._by_client(products).T)

    def _by_client(self, numbers: Tensor) -> Tensor:
        """Return the sums of each client's rows."""
        return torch.stack([numbers[part].sum(0) for part in self.span.parts])

    def move(self, pulled: Tensor, shares: Tensor) -> Tensor:
        """Return the coordinates, weighed."""
        return pulled * shares[self.span.owners, None]

    def take_in(self, move: Tensor, coordinates: Tensor) -> None:
        """Add rows rows^T move."""
        coordinates.addmm_(self.cross, move)

    def on_inputs(self, move: Tensor) -> Tensor:
        """Return move^T rows."""
        return move.T @ self.span.rows

    def seen(self, move: Tensor) -> Tensor:
        """Return rows rows^T move."""
        return self.cross @ move


class PullByPull(AlongDirections):
    """The same; what each pull does to all z is computed once, for Gram matrix and move."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.by_pull: Tensor | None = None

    def gram(self, pulled: Tensor) -> Tensor:
        """Return <what pull i does to z_j, z_j>."""
        if self.by_pull is None:
            self.by_pull = pulled.new_empty(len(self.span.parts), *pulled.shape)
        parts, products = self.span.parts, []
        for i, part in enumerate(parts):
            done = self.by_pull[i]
            for others in (slice(0, part.start), slice(part.stop, len(pulled))):
                torch.mm(self.cross[others, part], pulled[part], out=done[others])
            # a client's own directions are orthogonal
            torch.mul(self.span.values[part], pulled[part], out=done[part])
            for other in parts[i:]:
                products.append(torch.dot(done[other].view(-1), pulled[other].view(-1)))
        left, right = torch.triu_indices(len(parts), len(parts), device=pulled.device)
        found = pulled.new_empty(len(parts), len(parts))
        found[left, right] = found[right, left] = torch.stack(products)
        return found

    def move(self, pulled: Tensor, shares: Tensor) -> Tensor:
        """Return the coordinates, weighed; the shares are kept."""
        self.shares = shares
        return super().move(pulled, shares)

    def take_in(self, move: Tensor, coordinates: Tensor) -> None:
        """Add the weighed sum of what the pulls do."""
        assert self.by_pull is not None
        coordinates.view(-1).addmv_(self.by_pull.flatten(1).T, self.shares)


def cheapest(span: Span, *, gram: bool) -> Steps:
    """Return the way that takes the least time.

    Estimated as numbers of multiplications, a number that is read or written counting as 30: what a
    core with AVX-512 does meanwhile.

    Args:
        span: of a layer.
        gram: a Gram matrix is needed.
    """
    directions, width = span.rows.shape
    clients = len(span.parts)
    if not gram:
        return AlongDirections(span) if directions < 2 * width else AlongInputs(span)
    costs: dict[type[Steps], float] = {
        AlongInputs: width * (2 * directions + clients * (clients + 90)),
        AlongDirections: 2 * directions**2,
        PullByPull: directions * (directions * (1 - 1 / clients) + 90 * clients),
    }
    return min(costs, key=lambda kind: costs[kind])(span)
