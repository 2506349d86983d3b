"""A task: its data, partition, model and loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedhet.common.errors import ConfigError, SetupError
from fedhet.common.metrics import Kind
from fedhet.tasks import tabular
from fedhet.tasks.config import (
    AnyConfig,
    ImageConfig,
    OwnConfig,
    TextConfig,
    head_of,
    read_config,
)
from fedhet.tasks.examples import Examples
from fedhet.tasks.feature_shift import FeatureShift, Pixels
from fedhet.tasks.losses import loss_of, require_logits
from fedhet.tasks.metrics import Measured, Predictions
from fedhet.tasks.models import CONDITIONAL, AnyModel, build_model
from fedhet.tasks.models.wrapped import CHANNEL_KEYS, WrappedModel, refuse_channels
from fedhet.tasks.own_data import Functions
from fedhet.tasks.own_task import OwnTask
from fedhet.tasks.partitioned import Partitioned
from fedhet.tasks.partitions import PartitionConfig
from fedhet.tasks.sources import Split, open_source
from fedhet.tasks.sources.arrays import Indices
from fedhet.tasks.table_task import TableTask
from fedhet.tasks.tensor_data import ConditionedData, TensorData

Shift = Callable[[Pixels], Pixels]
SHIFT = "feature_shift"
SUBSET_STREAM = 2
TEST_SUBSET_SEED = 0  # the same test examples whatever the run's seed


def build_task(
    task: Mapping[str, Any],
    partition: Mapping[str, Any],
    *,
    seed: int,
    num_clients: int,
    functions: Functions | None = None,
    columns: str | None = None,
) -> AnyTask:
    """Return the task that plain values of conf/task/*.yaml and conf/partition/*.yaml describe.

    Args:
        task: values of the task group.
        partition: values of the partition group.
        seed: seed of the partition, the held-out examples and the training subset.
        num_clients: N.
        functions: for a task on own data, in place of the functions that it names.
        columns: statistics that the sites have fitted together (``TableTask.fits_columns``).

    Raises:
        ConfigError: for unknown keys and values out of range; the examples are checked when they
            are first read.
    """
    config, split = read_config(task), PartitionConfig.from_mapping(partition)
    if not isinstance(config, OwnConfig):
        return Task(config, split, seed, num_clients)
    functions = functions or Functions.of(config)
    if functions.data is tabular.load:
        return TableTask(config, split, seed, num_clients, functions, columns)
    return OwnTask(config, split, seed, num_clients, functions)


def kind_of(config: AnyConfig) -> Kind | None:
    """Return the kind of task; None for a conditional model, which predicts nothing."""
    if isinstance(config, OwnConfig):
        return config.kind
    return None if config.model in CONDITIONAL else "classification"


class Task(Measured, Partitioned):
    """Model, examples and loss; reads examples only when they are needed."""

    config: ImageConfig | TextConfig

    def __init__(
        self,
        config: ImageConfig | TextConfig,
        partition: PartitionConfig,
        seed: int,
        num_clients: int,
    ) -> None:
        self.config, self.partition = config, partition
        self.seed, self.num_clients = seed, num_clients
        self.name = config.name
        self._source = open_source(config)
        self._loss = loss_of("classification", config.loss)
        if partition.name == "site":
            config.require_shared_meaning()
        if partition.name == SHIFT and not isinstance(config, ImageConfig):
            raise ConfigError(
                f"partition={SHIFT} shifts images, and task={config.name} has none: choose another "
                "partition"
            )

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their labels."""
        return self._source.class_names()

    @property
    def count_names(self) -> tuple[str, ...]:
        """The names of the columns of ``class_counts``: the classes."""
        return self.class_names

    @property
    def num_classes(self) -> int:
        """C, the number of classes."""
        return len(self.class_names)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image, (T,) of a text."""
        return self.config.input_shape

    @property
    def vocabulary(self) -> tuple[str, ...] | None:
        """The words of a task on texts, by rank; None if the inputs are images."""
        vocabulary = self._source.vocabulary()
        return None if vocabulary is None else vocabulary.words

    def label_metadata(self) -> dict[str, str]:
        """Return the metadata of a model's file: its classes as JSON, and a vocabulary's hash."""
        vocabulary = self._source.vocabulary()
        words = {} if vocabulary is None else {"vocabulary": vocabulary.digest}
        return {"classes": json.dumps(self.class_names), **words}

    def build_model(self, seed: int) -> AnyModel:
        """Return a freshly initialised model on the CPU; the same seed, the same parameters."""
        model = build_model(
            self.config.model,
            input_shape=self.input_shape,
            num_classes=self.num_classes,
            head=head_of(self.config),
            options=self.config.model_options,
            lora=self.config.lora,
            seed=seed,
            **self.config.model_arguments,
        )
        if isinstance(model, WrappedModel) and isinstance(self.config, ImageConfig):
            keys = [f"task.{key}" for key in CHANNEL_KEYS]
            refuse_channels(model, self.input_shape, keys)
        # so that a large model is not built once more to be asked
        self.__dict__.setdefault("classifier_tensors", model.classifier_tensors)
        return model

    @cached_property
    def classifier_tensors(self) -> int:
        """The number of the model's last tensors that are its classifier (FedPVR's choice)."""
        return self.build_model(0).classifier_tensors

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of logits (B, C), by default the cross-entropy.

        A conditional model's outputs are parts of each example's loss: return their sums' mean.

        Raises:
            ConfigError: if the number of logits is not the number of classes.
        """
        if self.config.model in CONDITIONAL:
            return outputs.sum(dim=1).mean()
        require_logits(outputs, self.num_classes)
        return self._loss(outputs, labels)

    @property
    def predictions(self) -> Predictions | None:
        """Describes outputs and labels; None if nothing is predicted."""
        kind = kind_of(self.config)
        return None if kind is None else Predictions(kind, self.class_names)

    def client_data(
        self,
        client_id: int,
        device: torch.device | str = "cpu",
        *,
        channels_last: bool = False,
        site_folder: Path | str | None = None,
    ) -> tuple[TensorData, TensorData | None]:
        """Return a client's training examples and its held-out examples.

        Args:
            client_id: from 0 to N - 1.
            device: the examples' device.
            channels_last: yield batches of images in that memory format.
            site_folder: the node's own folder, with partition=site; its test split is held out.

        Raises:
            ConfigError: if the examples cannot be loaded or partitioned.
        """
        self.require_client(client_id)
        if self.partition.name == "site":
            train, held_out = self._site_splits(client_id, site_folder)
        else:
            rows = self.client_rows[client_id]
            train, held_out = self._hold_out(self.train_split, rows, client_id)
            if self.client_names and not self.partition.holdout:
                held_out = self._own_test(self.client_names[client_id])
        data = self._tensors(train, device, channels_last, self._shift_of(client_id, part=0))
        if held_out is None or len(held_out) == 0:
            return data, None
        shift = self._shift_of(client_id, part=1)
        return data, self._tensors(held_out, device, channels_last, shift)

    def _shift_of(self, client_id: int, part: int) -> Shift | None:
        """Return what happens to a client's images; None: nothing."""
        if self.partition.name != SHIFT:
            return None
        seed = self.seed if self.partition.seed is None else self.partition.seed
        shift = FeatureShift.of_client(self.partition.options, seed, client_id)
        return partial(shift, part=part)

    def test_data(
        self, device: torch.device | str = "cpu", *, channels_last: bool = False
    ) -> TensorData:
        """Return the global test set, the same for every seed."""
        test = self._source.load_test()
        if test is None:  # an empty split is false
            test = self._splits[1]
        chosen = _subset(len(test), self.config.test_size, [TEST_SUBSET_SEED, SUBSET_STREAM])
        return self._tensors(test if chosen is None else test.select(chosen), device, channels_last)

    def data_used(self, *, train: bool = True) -> dict[str, dict[str, object]]:
        """Return where the examples come from, and their hashes, by split ("train", "test").

        It leaves out the training examples with partition=site, and if ``train`` is false.
        """
        at_sites = self.partition.name == "site" or not train
        return self._source.used(["test"] if at_sites else ["train", "test"])

    @cached_property
    def train_split(self) -> Split:
        """The training examples of all clients, after task.train_size."""
        train = self._splits[0]
        chosen = _subset(len(train), self.config.train_size, [self.seed, SUBSET_STREAM])
        return train if chosen is None else train.select(chosen)

    @property
    def strata(self) -> Indices:
        """The labels of ``train_split``."""
        return self.train_split.labels

    @property
    def owners(self) -> NDArray[np.str_] | None:
        """The client of each example of ``train_split``; None if unknown."""
        return self.train_split.clients

    @property
    def num_natural_clients(self) -> int | None:
        """How many clients partition=natural can make, if that is known without decoding images."""
        return self._source.num_clients(self.partition.options.get("min_size", 1))

    @cached_property
    def _splits(self) -> tuple[Split, Split]:
        return self._source.load()

    def _own_test(self, name: str) -> Split | None:
        """Return a natural client's examples of the test set, if these are known."""
        test = self._source.load_test() or self._splits[1]
        return None if test.clients is None else test.select(np.flatnonzero(test.clients == name))

    def _site_splits(self, client_id: int, folder: Path | str | None) -> tuple[Split, Split | None]:
        if folder is None:
            raise SetupError(
                "with partition=site every node reads its own folder: start it with "
                "--node-config 'data-folder=\"/path/to/folder\"', or choose another partition"
            )
        train, test = self._source.load_site(Path(folder).expanduser())
        if test is not None:
            return train, test
        return self._hold_out(train, np.arange(len(train)), client_id)

    def _hold_out(self, split: Split, rows: Indices, client_id: int) -> tuple[Split, Split]:
        kept, held_out = self.held_out_of(rows, client_id, shared=self.partition.name != "site")
        return split.select(kept), split.select(held_out)

    def _tensors(
        self,
        split: Split,
        device: torch.device | str,
        channels_last: bool,
        shift: Shift | None = None,
    ) -> TensorData:
        kind = ConditionedData if self.config.model in CONDITIONAL else TensorData
        examples = split.read()
        return kind(
            examples if shift is None else shift(examples),
            split.labels,
            num_classes=self.num_classes,
            transform=self.config.transform,
            device=device,
            channels_last=channels_last,
        )


AnyTask = Task | OwnTask
AnyData = TensorData | Examples


def _subset(size: int, wanted: int | None, seed: list[int]) -> Indices | None:
    """Return a random choice of rows, ascending; None for all."""
    if wanted is None or wanted >= size:
        return None
    return np.sort(np.random.default_rng(seed).choice(size, wanted, replace=False))
