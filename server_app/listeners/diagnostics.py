"""Diagnostics by layer, in files beside metrics.jsonl (recipe key ``diagnostics``).

layers.jsonl: ``shapes`` of the tensors at round 0, then ``drift_diversity`` and ``update_norm`` by
tensor every round (update_diagnostics.py). similarity.jsonl: every few rounds ``cka`` by layer
(linear_cka.py), (N, N), between the models of ``clients`` on the test set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor

from fedhet.common.cpus import usable_cpus
from fedhet.common.errors import ConfigError
from fedhet.common.results import RowsFile
from fedhet.server_app.listeners import Listener, Start
from fedhet.strategies.base import Cohort, Reads, Reply, ReplySum, Tensors
from fedhet.strategies.components.tensor_selection import TensorSelector
from fedhet.strategies.round.server_model import ServerModel
from fedhet.strategies.round.update_diagnostics import diagnose_layers
from fedhet.strategies.statistics.linear_cka import layers_of, similarities
from fedhet.tasks.evaluation import Batched

LAYERS, SIMILARITY = "layers.jsonl", "similarity.jsonl"
DIGITS = 6
_BATCH_SIZE = 500


class Recorder(Listener):
    """An observer of the rounds' replies that writes its own file at ``path``."""

    reads = Reads.SUM
    key = "diagnostics"

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_start(self, start: Start) -> None:
        """Open the file: afresh, or to continue after the rounds that are done."""
        self.file = RowsFile(self.path, start.done)

    def __call__(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], cohort: Cohort
    ) -> None:
        """Measure a round."""
        raise NotImplementedError


class LayerFigures(Recorder):
    """Writes layers.jsonl, for the tensors named by ``shapes``."""

    reads = Reads.NORMS

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__(path)
        self.shapes = shapes

    def on_start(self, start: Start) -> None:
        """Open the file; a new one begins with the shapes."""
        super().on_start(start)
        if not self.file.rows:
            shapes = {name: list(shape) for name, shape in self.shapes.items()}
            self.file.append({"round": 0, "shapes": shapes})

    def __call__(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], cohort: Cohort
    ) -> None:
        """Write the round's line."""
        found = diagnose_layers(total, list(self.shapes))
        row: dict[str, Any] = {"round": cohort.round}
        for figure, by_layer in found.items():
            row[figure] = {name: _rounded(value) for name, value in by_layer.items()}
        self.file.append(row)


class Similarity(Recorder):
    """Writes similarity.jsonl, in the first round, every k-th and the last.

    Compared are the layers of the tensors ``names`` between the first ``clients`` of the round, on
    the first ``examples`` of the test set.
    """

    reads = Reads.MODELS

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

    def bind(self, server_model: ServerModel) -> None:
        """Keep the model; a batch of two examples checks that its layers can be compared."""
        self.server_model = server_model
        similarities(server_model.model, [{}], self.layers, self._batches(2))

    def __call__(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], cohort: Cohort
    ) -> None:
        """Write the round's line, if it is due and has two clients to compare."""
        due = cohort.round in (1, self.last) or cohort.round % self.every == 0
        chosen = replies[: self.clients]
        if not due or len(chosen) < 2:
            return
        model, models = self.server_model.model, list(map(self.server_model.trained, chosen))
        torch.set_num_threads(usable_cpus())  # no client trains meanwhile
        found = similarities(model, models, self.layers, self._batches(self.examples))
        torch.set_num_threads(1)
        cka = {n: [list(map(_rounded, row)) for row in m.tolist()] for n, m in found.items()}
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
    """Round to a few digits; JSON has no NaN."""
    return None if value != value else float(f"{value:.{DIGITS}g}")


def observers_of(
    recipe: DictConfig, folder: Path, server_model: ServerModel, test_data: Batched | None
) -> list[Recorder]:
    """Return the observers of the recipe's ``diagnostics``, writing into ``folder``."""
    options, found = recipe.diagnostics, list[Recorder]()
    shapes = {name: value.shape for name, value in server_model.model.named_parameters()}
    names = list(shapes)
    kept = TensorSelector(recipe.strategy.personal).select(names)
    shared = [name for name in names if name not in kept]
    if layers := TensorSelector(options.layers, "diagnostics.layers").select(shared):
        found.append(LayerFigures(folder / LAYERS, {n: shapes[n] for n in layers}))
    if compared := TensorSelector(options.cka, "diagnostics.cka").select(names):
        if kept:
            raise ConfigError(
                f"diagnostics.cka={options.cka} compares whole models, but the server does not "
                f"have {kept} (strategy.personal={recipe.strategy.personal}): set it to none"
            )
        if test_data is None:
            raise ConfigError(
                f"diagnostics.cka={options.cka} compares models on test examples, and the server "
                "has none: set task.test_data, or diagnostics.cka=none"
            )
        examples = len(test_data) if options.cka_examples is None else int(options.cka_examples)
        found.append(
            Similarity(
                folder / SIMILARITY,
                compared,
                test_data,
                examples=examples,
                every=int(options.cka_every),
                last=int(recipe.rounds),
                clients=int(options.cka_clients),
            )
        )
    return found
