"""A task on the user's own data, which the user's function returns."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from fedhet.common.errors import ConfigError, SetupError
from fedhet.tasks import tabular
from fedhet.tasks.column_statistics import ColumnStatistics
from fedhet.tasks.config import NAMED, OwnConfig, head_of
from fedhet.tasks.examples import IGNORED, Clients, Examples, clients_of, is_pair
from fedhet.tasks.losses import LOSSES, Loss, loss_of, require_logits
from fedhet.tasks.metrics import Measured, Predictions
from fedhet.tasks.models import AnyModel, build_model, build_own_model
from fedhet.tasks.models.wrapped import CHANNEL_KEYS, refuse_channels
from fedhet.tasks.partitioned import Partitioned
from fedhet.tasks.partitions import PartitionConfig
from fedhet.tasks.references import (
    Function,
    call_with_known,
    is_reference,
    load_reference,
    name_of,
)
from fedhet.tasks.sources.arrays import Indices

CLIENT = ("client_id", "partition_id")  # a data function with one of these gives one client's data
PUBLIC_COLUMNS = "public_columns"  # in a model's metadata: the columns of a table's public part
_READ = ("partition.holdout", "partition.unseen")  # of examples that a function has divided
_BINS = 10  # a partition by label divides a regression's targets into tenths


def gives_by_client(data: Function) -> bool:
    """Return whether a data function returns one client's examples."""
    return any(name in inspect.signature(data).parameters for name in CLIENT)


def refuse_unread_partition(data: Function, words: Iterable[str]) -> None:
    """Reject overrides that would divide data which the function has already divided."""
    if not gives_by_client(data):
        return
    for word in words:
        key, _, value = word.lstrip("+").partition("=")
        divides = key.startswith("partition.") and key not in _READ
        if divides or (key == "partition" and value != "site"):
            raise ConfigError(
                f"{word} changes nothing: task.data={name_of(data)} has the parameter client_id, "
                "so it gives each client's examples itself. Leave the word out, or the parameter"
            )


@dataclass(frozen=True)
class Functions:
    """The user's functions that a recipe names.

    Attributes:
        data: returns (train, test) of one client if it has a parameter ``client_id`` or
            ``partition_id``, or else of all; test may be None.
        model: returns an ``nn.Module``; None: the recipe names one of fedhet's models.
        test_data: returns the server's test examples; None: they are those of ``data`` if it
            returns everybody's, and otherwise there are none.
        loss: (outputs, targets) -> scalar.
    """

    data: Function
    model: Function | None
    test_data: Function | None
    loss: Loss

    @classmethod
    def of(cls, config: OwnConfig) -> Functions:
        """Load the functions that a recipe names."""
        own = is_reference(config.model)
        return cls(
            load_reference("task.data", config.data),
            load_reference("task.model", config.model) if own else None,
            load_reference("task.test_data", config.test_data) if config.test_data else None,
            loss_of(config.kind, config.loss),
        )


class OwnTask(Measured, Partitioned):
    """Model, examples and loss of the user's; reads examples only when they are needed.

    Args:
        config: the recipe's group ``task``.
        partition: the partition, if the data function returns everybody's examples.
        seed: the seed of the partition and of the held-out examples.
        num_clients: N.
        functions: the functions that the config names.
        columns: the statistics of a table's columns, if the sites have fitted them together.
    """

    config: OwnConfig
    vocabulary = None

    def __init__(
        self,
        config: OwnConfig,
        partition: PartitionConfig,
        seed: int,
        num_clients: int,
        functions: Functions | None = None,
        columns: str | None = None,
    ) -> None:
        if partition.name == "feature_shift":
            raise ConfigError(
                "partition=feature_shift shifts the images of fedhet's own image tasks, and "
                f"task={config.name} has its examples from a function: choose another partition"
            )
        self.config, self.partition = config, partition
        self.seed, self.num_clients = seed, num_clients
        self.name, self.columns = config.name, columns
        self._compared = False  # the loss with that of outputs (B,)
        self.functions = functions or Functions.of(config)
        if self.functions.data is tabular.load and partition.name != "site":
            self.config = tabular.inferred(config)
        names = inspect.signature(self.functions.data).parameters
        self.by_client = gives_by_client(self.functions.data)
        # ... and with partition=site one that takes a folder, which the server calls without.
        self.by_folder = partition.name == "site" and "data_folder" in names

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, a scalar.

        Raises:
            ConfigError: if the number of logits is not that of classes, if the loss is not a
                scalar, or if it compares all pairs of outputs and targets.
        """
        if not self.any_label:
            require_logits(outputs, self.num_classes)
        loss: Any = self.functions.loss(outputs, targets)
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            what = f"the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise ConfigError(
                f"task.loss={self.config.loss} returned {what}: it must be the mean loss, a scalar "
                "tensor"
            )
        if not self._compared and len(targets) > 1:
            self._compared = True
            self._refuse_pairs(outputs.detach(), targets)
        return loss

    def _refuse_pairs(self, outputs: Tensor, targets: Tensor) -> None:
        """Reject a loss that broadcasts outputs (B, 1) and targets (B,) to (B, B)."""
        if outputs.shape != (*targets.shape, 1):
            return
        pairs = False
        with suppress(Exception), torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            as_given = self.functions.loss(outputs, targets)
            torch.manual_seed(0)
            # raises if the function itself expects outputs (B, 1)
            by_row = self.functions.loss(outputs.squeeze(-1), targets)
            pairs = not torch.allclose(as_given, by_row, rtol=1e-3, equal_nan=True)
        if pairs:
            raise ConfigError(
                f"task.loss={self.config.loss} compares each of the outputs {tuple(outputs.shape)} "
                f"with all targets {tuple(targets.shape)}: take outputs.squeeze(-1) in it, or give "
                "targets (n, 1)"
            )

    @cached_property
    def any_label(self) -> bool:
        """Whether labels may differ from 0 to C - 1, and outputs from logits of C classes.

        A regression has numbers. In a segmentation the user's own loss may read the outputs as it
        likes, such as one logit of a foreground. A classification's accuracy always takes the
        largest logit.
        """
        kind, loss = self.config.kind, self.functions.loss
        own = loss not in LOSSES[kind].values()
        return kind == "regression" or (kind == "segmentation" and own)

    @cached_property
    def num_classes(self) -> int:
        """C: the recipe's, or else the number of the model's outputs; 0 for a regression."""
        if self.config.kind == "regression":
            return 0
        if self.config.class_names is not None:
            return len(self.config.class_names)
        head = self._built[0]
        outputs = _outputs_of(head)
        if outputs is None:
            raise ConfigError(
                f"task.num_classes=null: a {type(head).__name__} does not tell how many classes "
                "the model has: set it"
            )
        return outputs

    @cached_property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their labels; none for a regression."""
        return self.config.class_names or tuple(map(str, range(self.num_classes)))

    @cached_property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: the recipe's, or else that of the server's own examples."""
        if self.config.input_shape is not None:
            return tuple(self.config.input_shape)
        given = self._server_test if self.by_client else self._all[0]
        if given is None:
            raise ConfigError(
                "task.input_shape=null, and the server has no example to take it from: set it"
            )
        # The model may tell the number of classes, and needs the shape: do without the number here.
        kind, columns = self.config.kind, self.config.columns
        examples = Examples(given, kind=kind, num_classes=0, any_label=True, columns=columns)
        return examples.input_shape

    @property
    def predictions(self) -> Predictions:
        """Describes outputs and targets."""
        kind = self.config.kind
        ignored = IGNORED if kind == "segmentation" else None
        outputs = int(getattr(self._built[0], "out_features", 1)) if kind == "regression" else 1
        return Predictions(kind, self.class_names, outputs, ignored)

    def label_metadata(self) -> dict[str, str]:
        """Return the metadata of a model's file: the classes, and the kind of task."""
        found = {"classes": json.dumps(self.class_names), "kind": self.config.kind}
        if self.columns is not None:
            return {**found, "columns": self.columns}
        if self.functions.data is not tabular.load:
            return found
        public = tabular.fitted_options(self.config.arguments)
        return {**found, PUBLIC_COLUMNS: json.dumps(public)} if public else found

    @property
    def fits_columns(self) -> bool:
        """Whether the sites fit the columns of their tables together, before round 1."""
        options = self.config.data_options or {}
        return self.functions.data is tabular.load and options.get("fit") == "federated"

    @property
    def about(self) -> list[str]:
        """Lines that say how the task reads a table whose columns it has found out."""
        reads_table = self.functions.data is tabular.load and not self.by_folder
        return tabular.described(self.config) if reads_table else []

    def site_name(self, folder: Path | str | None) -> str | None:
        """Return the value of ``task.client_column``, if all rows of a site's table have one."""
        column = self.config.client_column
        reads_table = self.by_folder and self.functions.data is tabular.load
        if not reads_table or column is None or folder is None:
            return None
        return tabular.site_name(self.config.arguments, Path(folder).expanduser())

    def column_statistics(
        self, client_id: int, site_folder: Path | str | None = None
    ) -> ColumnStatistics:
        """Return a client's statistics of its training rows, to fit columns together."""
        self.require_client(client_id)
        train, _ = self._own(client_id, site_folder) if self.by_folder else self._part(client_id)
        folder = Path(site_folder).expanduser() if self.by_folder and site_folder else None
        # Before the fit, an example's only input is the number of its row.
        return tabular.statistics_of(train[0][:, 0], self.config.arguments, folder)

    def build_model(self, seed: int) -> AnyModel:
        """Return a freshly initialised model on the CPU; the same seed, the same parameters."""
        config, known = self.config, self._known_to_models()
        classifies = config.kind == "classification"
        how: dict[str, Any] = {"head": head_of(config), "lora": config.lora, "seed": seed}
        if self.functions.model is None:
            model = build_model(
                config.model,
                input_shape=self.input_shape,
                num_classes=config.outputs,
                options=config.model_options,
                **how,
            )
            model.classifies = model.classifies and classifies
            return model
        own = build_own_model(
            self.functions.model, known, config.model_options or {}, classifies=classifies, **how
        )
        options = config.data_options or {}
        if {"channels", "image_size"} <= options.keys() and options.get("tokenizer") is None:
            shape = (options["channels"], *[options["image_size"]] * 2)
            keys = [f"task.data_options.{key}" for key in CHANNEL_KEYS if key in options]
            refuse_channels(own, shape, keys)
        return own

    @cached_property
    def classifier_tensors(self) -> int:
        """The number of the model's last tensors that are its classifier."""
        return self._built[1]

    def client_data(
        self,
        client_id: int,
        device: torch.device | str = "cpu",
        *,
        channels_last: bool = False,
        site_folder: Path | str | None = None,
    ) -> tuple[Examples, Examples | None]:
        """Return a client's training examples and its held-out examples.

        Raises:
            ConfigError: if the data function returns no training example, or anything else.
        """
        self.require_client(client_id)
        if self.by_client or self.by_folder:
            train, test = self._own(client_id, site_folder)
        else:
            train, test = self._part(client_id)
        examples = self._examples(train, device, channels_last)
        if len(examples) == 0:
            raise ConfigError(f"task.data gives client {client_id} no training example")
        held_out = None if test is None else self._examples(test, device, channels_last)
        return examples, held_out if held_out is not None and len(held_out) else None

    def test_data(
        self, device: torch.device | str = "cpu", *, channels_last: bool = False
    ) -> Examples | None:
        """Return the server's test set; None if there is none, and the clients evaluate."""
        given = self._server_test
        test = None if given is None else self._examples(given, device, channels_last)
        return test if test is not None and len(test) else None

    def data_used(self, *, train: bool = True) -> dict[str, dict[str, object]]:
        """Return by split which function gave the server's examples, and their hash.

        Per-client data and Datasets are not hashed.
        """
        config, given = self.config, dict[str, tuple[str | None, Any]]()
        if train and not (self.by_client or self.by_folder or self.partition.name == "site"):
            given["train"] = (config.data, self._all[0])
        given["test"] = (config.test_data or config.data, self._server_test)
        found = dict[str, dict[str, object]]()
        for split, (function, examples) in given.items():
            known = None if examples is None else self._examples(examples, "cpu").sha256()
            if known is not None:
                found[split] = {"function": function, "sha256": known}
        return found

    @property
    def strata(self) -> Indices:
        """Classes, tenths of a regression's targets or a single value, if ``data`` returns all."""
        return self._stratified[0]

    @property
    def owners(self) -> Clients:
        """The client of each training example; None if unknown."""
        return None if self.by_client else self._clients[0]

    @property
    def count_names(self) -> tuple[str, ...]:
        """The names of the columns of :meth:`class_counts`: classes, tenths, or all examples."""
        if self.by_client or self.by_folder:
            return self.class_names if self.config.kind == "classification" else ("examples",)
        return self._stratified[1]

    def class_counts(self) -> Indices:
        """Return how many examples of each class each client holds, (N, C).

        In a regression a column is a tenth of the targets. There is one column for all examples,
        (N, 1), if an example has several labels, or in a regression with per-client data.
        """
        if self.by_client or self.by_folder:
            by_class = self.config.kind == "classification"
            clients = (self.client_data(number)[0] for number in range(self.num_clients))
            return np.array([one.class_counts() if by_class else [len(one)] for one in clients])
        return super().class_counts()

    # ---- pieces ------------------------------------------------------------------------------

    @cached_property
    def _built(self) -> tuple[torch.nn.Module, int]:
        """Build a model once; return its head and the number of its tensors."""
        model, config = self.build_model(0), self.config
        head = model.get_submodule("head")
        if config.kind == "classification" and config.classifier is None and config.class_names:
            outputs, classes = _outputs_of(head), len(config.class_names)
            if outputs not in (None, classes):
                raise ConfigError(
                    f"task.classifier=null takes the model's last linear layer as its classifier, "
                    f"{getattr(model, 'classifier', 'head')}, which has {outputs} outputs for "
                    f"{classes} classes: name the module that makes the logits"
                )
        return head, model.classifier_tensors

    def _known_to_models(self) -> dict[str, Any]:
        """Return the values that a model function may take, by parameter name."""
        config, known = self.config, dict[str, Any]()
        if config.class_names is not None:
            known["num_classes"] = len(config.class_names)
        # 1 for a regression is a guess; a function's own default is better
        guess = config.kind == "regression" and _needs(self.functions.model, "outputs")
        if guess or (config.kind != "regression" and config.class_names is not None):
            known["outputs"] = config.outputs
        if config.input_shape is not None or _needs(self.functions.model, "input_shape"):
            known["input_shape"] = self.input_shape
        return known

    def _known(self, client_id: int | None, folder: Path | str | None) -> dict[str, Any]:
        """Return the values that a data function may take, by parameter name."""
        known: dict[str, Any] = {
            "num_clients": self.num_clients,
            "num_partitions": self.num_clients,
            "seed": self.seed,
            "kind": self.config.kind,
            "classes": self.config.class_names,
            **{name: given for name in NAMED if (given := getattr(self.config, name)) is not None},
        }
        if self.fits_columns:
            known["fitted"] = self.columns
        if client_id is not None:
            known |= dict.fromkeys(CLIENT, client_id)
        if folder is not None:
            known["data_folder"] = Path(folder).expanduser()
        return known

    def _given(self, client_id: int | None, folder: Path | str | None) -> tuple[Any, Any]:
        known, options = self._known(client_id, folder), self.config.data_options or {}
        names = (*CLIENT, "data_folder", *NAMED)
        parameters = inspect.signature(self.functions.data).parameters
        for name in ("path", "target"):
            if name in known and name not in parameters:
                raise ConfigError(
                    f"task.{name}={known[name]}: task.data={self.config.data} has no parameter "
                    f"{name}: set task.{name}=null, or give the function that parameter"
                )
        given = call_with_known("task.data", self.functions.data, known, options, names=names)
        if not (isinstance(given, (tuple, list)) and len(given) == 2):
            raise ConfigError(
                f"task.data={self.config.data} returned a {type(given).__name__}: it must return "
                "(train, test); test may be None"
            )
        if given[0] is None or isinstance(given[0], str | Path | np.ndarray | Tensor):
            raise ConfigError(
                f"task.data={self.config.data} returned (train, test) with a "
                f"{type(given[0]).__name__} for train: it must be a pair (inputs, targets), a "
                "Dataset or a DataLoader, so return ((inputs, targets), test); test may be None"
            )
        return given[0], given[1]

    @property
    def num_natural_clients(self) -> int | None:
        """How many clients partition=natural can make; None if nothing tells whose examples are."""
        if self.by_folder or (clients := self.owners) is None:
            return None
        _, sizes = np.unique(clients, return_counts=True)
        return int((sizes >= self.partition.options.get("min_size", 1)).sum())

    @cached_property
    def _all(self) -> tuple[Any, Any]:
        return self._parts_of_all[0]

    @cached_property
    def _clients(self) -> tuple[Clients, Clients]:
        """The client of each training example, and of each test example; None if unknown."""
        return self._parts_of_all[1]

    @cached_property
    def _parts_of_all(self) -> tuple[tuple[Any, Any], tuple[Clients, Clients]]:
        train, test = (
            clients_of(given, self.config.client_column) for given in self._given(None, None)
        )
        return (train[0], test[0]), (train[1], test[1])

    @cached_property
    def _server_test(self) -> Any:
        if self.functions.test_data is not None:
            known = self._known(None, None) | dict(self.config.data_options or {})
            found = call_with_known(
                "task.test_data",
                self.functions.test_data,
                known,
                {},
                options_key="task.data_options",
            )
            if is_pair(found) and all(is_pair(one) for one in found):
                raise ConfigError(
                    f"task.test_data={self.config.test_data} returned a pair of pairs: it must "
                    "return only the test examples, such as (inputs, targets)"
                )
            return found
        return None if self.by_client else self._all[1]

    def _own(self, client_id: int, folder: Path | str | None) -> tuple[Any, Any]:
        """Return a client's own examples; partition.holdout may hold out some of them."""
        if self.by_folder and folder is None:
            raise SetupError(
                "with partition=site every node reads its own folder: start it with "
                "--node-config 'data-folder=\"/path/to/folder\"', or choose another partition"
            )
        train, test = self._given(client_id, folder)
        if test is not None or not self.partition.holdout:
            return train, test
        rows = np.arange(len(self._examples(train, "cpu")))
        kept, held_out = self.held_out_of(rows, client_id, shared=False)
        return _select(train, kept), _select(train, held_out)

    def _part(self, client_id: int) -> tuple[Any, Any]:
        if self.partition.name == "site":
            raise ConfigError(
                "with partition=site every client has its own data, but task.data="
                f"{self.config.data} returns everybody's: give it a parameter client_id, or "
                "data_folder for the node's folder"
            )
        kept, held_out = self.held_out_of(self.client_rows[client_id], client_id, shared=True)
        train = _select(self._all[0], kept)
        if self.client_names and self._clients[1] is not None and not self.partition.holdout:
            own = np.flatnonzero(self._clients[1] == self.client_names[client_id])
            return train, _select(self._all[1], own)
        return train, _select(self._all[0], held_out)

    @cached_property
    def _stratified(self) -> tuple[Indices, tuple[str, ...]]:
        """The values (n,) that a partition by label divides by, and their names.

        They are classes, tenths of a regression's targets, or one value for all if an example has
        several labels.
        """
        examples = self._examples(self._all[0], "cpu")
        if len(examples) == 0:
            raise ConfigError(
                f"task.data={self.config.data} gives no training example: change task.path="
                f"{self.config.path} or task.data_options={dict(self.config.data_options or {})}"
            )
        kind = self.config.kind
        if kind == "classification" and (labels := examples.targets()).ndim == 1:
            return labels.astype(np.int64), self.class_names
        if kind == "regression":
            targets = examples.targets().reshape(len(examples), -1)[:, 0]
            borders = np.quantile(targets, np.arange(1, _BINS) / _BINS)
            tenths = tuple(f"tenth {number + 1}" for number in range(_BINS))
            return np.searchsorted(borders, targets).astype(np.int64), tenths
        if self.partition.name not in ("iid", "natural"):
            shape = examples.targets().shape if kind == "classification" else ()
            several = f"labels of the shape {shape}" if shape else "several labels per example"
            cure = " give the shape (n,) (labels.argmax(1) of one-hot ones), or" if shape else ""
            raise ConfigError(
                f"partition={self.partition.name} divides by labels, but this task.kind={kind} has "
                f"{several}:{cure} set partition=iid"
            )
        return np.zeros(len(examples), dtype=np.int64), ("examples",)

    def _examples(
        self, given: Any, device: torch.device | str, channels_last: bool = False
    ) -> Examples:
        return Examples(
            given,
            kind=self.config.kind,
            num_classes=self.num_classes,
            any_label=self.any_label,
            columns=self.config.columns,
            device=device,
            channels_last=channels_last,
        )


def _outputs_of(head: torch.nn.Module) -> int | None:
    """Return the number of a classifier's outputs; None if it is unknown."""
    outputs = getattr(head, "out_features", getattr(head, "out_channels", None))
    return None if outputs is None else int(outputs)


def _needs(function: Function | None, parameter: str) -> bool:
    """Return whether a function has a parameter of this name, without a default."""
    if function is None:
        return False
    try:
        found = inspect.signature(function).parameters.get(parameter)
    except ValueError:  # a builtin has no signature
        return False
    return found is not None and found.default is found.empty


def _select(given: Any, rows: Indices) -> Any:
    """Return some rows of a data function's result."""
    if is_pair(given):
        return tuple(_rows(one, rows) for one in given)
    if not isinstance(given, DataLoader):
        return Subset(given, rows.tolist())
    subset: Any = Subset(given.dataset, rows.tolist())
    return DataLoader(subset, given.batch_size, collate_fn=given.collate_fn)


def _rows(values: Any, rows: Indices) -> Any:
    if torch.is_tensor(values):
        return values[torch.from_numpy(rows)]
    if hasattr(values, "iloc"):  # pandas: each column keeps its type
        return values.iloc[rows]
    return np.asanyarray(values)[rows]  # masked values stay masked
