"""Figures of every layer, in files beside metrics.jsonl (recipe key ``diagnostics``).

layers.jsonl: ``shapes`` of the tensors at round 0, then a line a round, ``drift_diversity`` and
``update_norm`` by tensor (update_diagnostics.py). similarity.jsonl: a line every so many
rounds, ``cka`` by layer (linear_cka.py) between the models of ``clients``, (N, N), on
the test set.

Both are measured at the server, which has the updates and the test set, and change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from common.errors import ConfigError, require_whole
from common.results import RowsFile
from server_app.machine import usable_cpus
from strategies.base import Cohort, Reply, Tensors
from strategies.components.tensor_selection import TensorSelector
from strategies.round.server_network import Network
from strategies.statistics.linear_cka import layers_of, similarities
from strategies.statistics.update_diagnostics import diagnose_layers
from tasks.evaluation import Batched

LAYERS, SIMILARITY = "layers.jsonl", "similarity.jsonl"
DIGITS = 6
_BATCH_SIZE = 500


class Recorder:
    """An observer that writes a file of its own.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def start(self, last_round: int | None) -> None:
        """Open the file: afresh, or to go on after ``last_round``."""
        self.file = RowsFile(self.path, last_round)

    def __call__(self, params: Tensors, replies: Sequence[Reply], cohort: Cohort) -> None:
        """Measure a round."""
        raise NotImplementedError


class LayerFigures(Recorder):
    """Writes each layer's figures of every round.

    Args:
        path: of layers.jsonl.
        shapes: of the tensors, by name.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__(path)
        self.shapes = shapes

    def start(self, last_round: int | None) -> None:
        """Open the file; a fresh one begins with the shapes."""
        super().start(last_round)
        if not self.file.rows:
            shapes = {name: list(shape) for name, shape in self.shapes.items()}
            self.file.append({"round": 0, "shapes": shapes})

    def __call__(self, params: Tensors, replies: Sequence[Reply], cohort: Cohort) -> None:
        """Write the round's line."""
        found = diagnose_layers(replies, list(self.shapes))
        rounded = {
            figure: {name: _rounded(value) for name, value in by_layer.items()}
            for figure, by_layer in found.items()
        }
        self.file.append({"round": cohort.round, **rounded})


class Similarity(Recorder):
    """Writes how alike the clients' models are, in the first round, every k-th and the last.

    Args:
        path: of similarity.jsonl.
        names: tensors at whose layers they are compared.
        test_data: on whose examples.
        examples: of them, the first ones.
        every: k.
        last: the last round.
        clients: of the round's clients, the first ones.

    Raises:
        ConfigError: where a layer gives no features.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        test_data: Batched,
        *,
        examples: int,
        every: int,
        last: int,
        clients: int,
    ) -> None:
        super().__init__(path)
        self.layers, self.test_data = layers_of(names), test_data
        self.examples, self.every, self.last, self.clients = examples, every, last, clients

    def bind(self, network: Network) -> None:
        """Take the network; one batch of two says whether its layers can be compared."""
        self.network = network
        similarities(network.model, [{}], self.layers, self._batches(2))

    def __call__(self, params: Tensors, replies: Sequence[Reply], cohort: Cohort) -> None:
        """Write the round's line, if it is due and has two clients to compare."""
        due = cohort.round in (1, self.last) or cohort.round % self.every == 0
        chosen = replies[: self.clients]
        if not due or len(chosen) < 2:
            return
        models = [self.network.trained(reply) for reply in chosen]
        torch.set_num_threads(usable_cpus())  # no client trains meanwhile
        found = similarities(self.network.model, models, self.layers, self._batches(self.examples))
        torch.set_num_threads(1)
        cka = {
            layer: [[_rounded(value) for value in row] for row in matrix.tolist()]
            for layer, matrix in found.items()
        }
        clients = [reply.client_id for reply in chosen]
        self.file.append({"round": cohort.round, "clients": clients, "cka": cka})

    def _batches(self, examples: int) -> Iterator[Tensor]:
        left, size = examples, min(_BATCH_SIZE, examples)
        for inputs, _ in self.test_data.batches(size, generator=None, train=False):
            yield inputs[:left]
            left -= len(inputs)
            if left <= 0:
                return


def _rounded(value: float) -> float | None:
    """Keep as many digits as tell runs apart; JSON has no NaN."""
    return None if value != value else float(f"{value:.{DIGITS}g}")


def observers_of(
    recipe: DictConfig, folder: Path, network: Network, test_data: Batched
) -> list[Recorder]:
    """Return what the recipe's ``diagnostics`` asks for.

    Args:
        recipe: composed.
        folder: the results directory.
        network: of the task.
        test_data: the global test set.

    Raises:
        ConfigError: where a selector selects nothing, a number is out of range, or clients keep
            tensors of their own and cannot be compared.
    """
    options, found = recipe.diagnostics, list[Recorder]()
    shapes = {name: value.shape for name, value in network.model.named_parameters()}
    names = list(shapes)
    kept = TensorSelector(recipe.strategy.personal).select(names)
    shared = [name for name in names if name not in kept]
    if layers := TensorSelector(options.layers, "diagnostics.layers").select(shared):
        found.append(LayerFigures(folder / LAYERS, {n: shapes[n] for n in layers}))
    if compared := TensorSelector(options.cka, "diagnostics.cka").select(names):
        if kept:
            raise ConfigError(
                f"diagnostics.cka={options.cka} compares whole models, and the server has not the "
                f"clients' {kept} (strategy.personal={recipe.strategy.personal}): set it to none"
            )
        examples = len(test_data) if options.cka_examples is None else int(options.cka_examples)
        found.append(
            Similarity(
                folder / SIMILARITY,
                compared,
                test_data,
                examples=require_whole("diagnostics.cka_examples", examples, low=2),
                every=require_whole("diagnostics.cka_every", options.cka_every, low=1),
                last=int(recipe.rounds),
                clients=require_whole("diagnostics.cka_clients", options.cka_clients, low=2),
            )
        )
    return found
