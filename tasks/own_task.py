"""A task on the user's own data, which the user's function returns."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.common.errors import ConfigError, SetupError
from fedhet.tasks.config import NAMED, OwnConfig, head_of
from fedhet.tasks.examples import IGNORED, Clients, Examples
from fedhet.tasks.losses import LOSSES, require_logits
from fedhet.tasks.metrics import Measured, Predictions
from fedhet.tasks.models import AnyModel, build_model, build_own_model
from fedhet.tasks.models.wrapped import CHANNEL_KEYS, refuse_channels
from fedhet.tasks.own_data import Functions, OwnData, select
from fedhet.tasks.partitioned import Partitioned
from fedhet.tasks.partitions import PartitionConfig
from fedhet.tasks.references import Function
from fedhet.tasks.sources.arrays import Indices

_BINS = 10  # a partition by label divides a regression's targets into tenths


class OwnTask(Measured, Partitioned):
    """Model, examples and loss of the user's; reads examples only when they are needed.

    Args:
        config: the recipe's group ``task``.
        partition: the partition, if the data function returns everybody's examples.
        seed: the seed of the partition and of the held-out examples.
        num_clients: N.
        functions: the functions that the config names.
    """

    config: OwnConfig
    vocabulary = None

    def __init__(
        self,
        config: OwnConfig,
        partition: PartitionConfig,
        seed: int,
        num_clients: int,
        functions: Functions,
    ) -> None:
        if partition.name == "feature_shift":
            raise ConfigError(
                "partition=feature_shift shifts the images of fedhet's own image tasks, and "
                f"task={config.name} has its examples from a function: choose another partition"
            )
        self.config, self.partition = config, partition
        self.seed, self.num_clients = seed, num_clients
        self.name, self.functions = config.name, functions
        self._compared = False  # the loss with that of outputs (B,)
        self.by_client = functions.by_client
        names = inspect.signature(functions.data).parameters
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
        given = self._data.server_test if self.by_client else self._data.all[0]
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
        return {"classes": json.dumps(self.class_names), "kind": self.config.kind}

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
        train, test = self._parts_of(client_id, site_folder)
        examples = self._filled(client_id, train, device, channels_last)
        held_out = None if test is None else self._examples(test, device, channels_last)
        return examples, held_out if held_out is not None and len(held_out) else None

    def test_data(
        self, device: torch.device | str = "cpu", *, channels_last: bool = False
    ) -> Examples | None:
        """Return the server's test set; None if there is none, and the clients evaluate."""
        given = self._data.server_test
        test = None if given is None else self._examples(given, device, channels_last)
        return test if test is not None and len(test) else None

    def data_used(self, *, train: bool = True) -> dict[str, dict[str, object]]:
        """Return by split which function gave the server's examples, and their hash.

        Per-client data and Datasets are not hashed.
        """
        config, given = self.config, dict[str, tuple[str | None, Any]]()
        if train and not (self.by_client or self.by_folder or self.partition.name == "site"):
            given["train"] = (config.data, self._data.all[0])
        given["test"] = (config.test_data or config.data, self._data.server_test)
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
        return None if self.by_client else self._data.clients[0]

    @property
    def count_names(self) -> tuple[str, ...]:
        """The names of the columns of :meth:`class_counts`: classes, tenths, or all examples."""
        if self.by_client or self.by_folder:
            return self.class_names if self.config.kind == "classification" else ("examples",)
        return self._stratified[1]

    def class_counts(self) -> Indices:
        """Return how many examples of each class each client holds, held-out ones too, (N, C).

        In a regression a column is a tenth of the targets. There is one column for all examples,
        (N, 1), if an example has several labels, or in a regression with per-client data.
        """
        if self.by_client or self.by_folder:
            by_class = self.config.kind == "classification"
            given = (self._given(number, None)[0] for number in range(self.num_clients))
            clients = (self._filled(*client) for client in enumerate(given))
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

    @cached_property
    def _data(self) -> OwnData:
        return OwnData(self.config, self.functions, self._known_to_data())

    def _known_to_data(self) -> dict[str, Any]:
        """Return the values that a data function may take, by parameter name."""
        known = {
            "num_clients": self.num_clients,
            "num_partitions": self.num_clients,
            "seed": self.seed,
            "kind": self.config.kind,
            "classes": self.config.class_names,
            **{name: getattr(self.config, name) for name in NAMED},
        }
        return {name: value for name, value in known.items() if value is not None}

    @property
    def num_natural_clients(self) -> int | None:
        """How many clients partition=natural can make; None if nothing tells whose examples are."""
        if self.by_folder or (clients := self.owners) is None:
            return None
        _, sizes = np.unique(clients, return_counts=True)
        return int((sizes >= self.partition.options.get("min_size", 1)).sum())

    def _parts_of(self, client_id: int, folder: Path | str | None) -> tuple[Any, Any]:
        """Return a client's examples to train on, and those held out."""
        self.require_client(client_id)
        divided = self.by_client or self.by_folder
        return self._own(client_id, folder) if divided else self._part(client_id)

    def _own(self, client_id: int, folder: Path | str | None) -> tuple[Any, Any]:
        """Return a client's own examples; partition.holdout may hold out some of them."""
        train, test = self._given(client_id, folder)
        if test is not None or not self.partition.holdout:
            return train, test
        rows = np.arange(len(self._examples(train, "cpu")))
        kept, held_out = self.held_out_of(rows, client_id, shared=False)
        return select(train, kept), select(train, held_out)

    def _given(self, client_id: int, folder: Path | str | None) -> tuple[Any, Any]:
        """Return (train, test) as the data function gives them to a client."""
        if self.by_folder and folder is None:
            raise SetupError(
                "with partition=site every node reads its own folder: start it with "
                "--node-config 'data-folder=\"/path/to/folder\"', or choose another partition"
            )
        return self._data.of_client(client_id, folder)

    def _part(self, client_id: int) -> tuple[Any, Any]:
        if self.partition.name == "site":
            raise ConfigError(
                "with partition=site every client has its own data, but task.data="
                f"{self.config.data} returns everybody's: give it a parameter client_id, or "
                "data_folder for the node's folder"
            )
        kept, held_out = self.held_out_of(self.client_rows[client_id], client_id, shared=True)
        (all_train, all_test), (_, test_clients) = self._data.all, self._data.clients
        train = select(all_train, kept)
        if self.client_names and test_clients is not None and not self.partition.holdout:
            own = np.flatnonzero(test_clients == self.client_names[client_id])
            return train, select(all_test, own)
        return train, select(all_train, held_out)

    @cached_property
    def _stratified(self) -> tuple[Indices, tuple[str, ...]]:
        """The values (n,) that a partition by label divides by, and their names.

        They are classes, tenths of a regression's targets, or one value for all if an example has
        several labels.
        """
        examples = self._examples(self._data.all[0], "cpu")
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

    def _filled(
        self,
        client_id: int,
        train: Any,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> Examples:
        """Return a client's training examples; refuse none."""
        examples = self._examples(train, device, channels_last)
        if len(examples) == 0:
            raise ConfigError(f"task.data gives client {client_id} no training example")
        return examples

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
