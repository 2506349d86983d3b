"""The examples of a task on the user's own data, as the user's functions return them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from fedhet.common.errors import ConfigError
from fedhet.tasks.config import NAMED, OwnConfig
from fedhet.tasks.examples import Clients, clients_of, is_pair
from fedhet.tasks.losses import Loss, loss_of
from fedhet.tasks.references import (
    Function,
    call_with_known,
    is_reference,
    load_reference,
    name_of,
)
from fedhet.tasks.sources.arrays import Indices

CLIENT = ("client_id", "partition_id")  # a data function with one of these gives one client's data
_READ = ("partition.holdout", "partition.unseen")  # of examples that a function has divided


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

    @property
    def by_client(self) -> bool:
        """Whether ``data`` returns one client's examples."""
        return gives_by_client(self.data)


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


class OwnData:
    """What the user's functions return: all examples and the server's once, a client's each time.

    Args:
        config: the recipe's group ``task``.
        functions: the functions that it names.
        known: values that ``task.data`` and ``task.test_data`` may take, by parameter name.
    """

    def __init__(self, config: OwnConfig, functions: Functions, known: Mapping[str, Any]) -> None:
        self._config, self._functions, self._known = config, functions, known

    @cached_property
    def all(self) -> tuple[Any, Any]:
        """Everybody's (train, test)."""
        return self._all_with_clients[0]

    @cached_property
    def clients(self) -> tuple[Clients, Clients]:
        """The client of each training example, and of each test example; None if unknown."""
        return self._all_with_clients[1]

    @cached_property
    def _all_with_clients(self) -> tuple[tuple[Any, Any], tuple[Clients, Clients]]:
        train, test = (clients_of(given, self._config.client_column) for given in self._given({}))
        return (train[0], test[0]), (train[1], test[1])

    def of_client(self, client_id: int, folder: Path | str | None) -> tuple[Any, Any]:
        """Return one client's (train, test); ``folder`` is its site's, if it has one."""
        known: dict[str, Any] = dict.fromkeys(CLIENT, client_id)
        if folder is not None:
            known["data_folder"] = Path(folder).expanduser()
        train, test = self._given(known)
        return clients_of(train, None)[0], clients_of(test, None)[0]  # all are this client's

    @cached_property
    def server_test(self) -> Any:
        """The server's test examples; None if it has none."""
        if self._functions.test_data is None:
            return None if self._functions.by_client else self.all[1]
        known = {**self._known, **(self._config.data_options or {})}
        found = call_with_known(
            "task.test_data",
            self._functions.test_data,
            known,
            {},
            options_key="task.data_options",
        )
        if is_pair(found) and all(is_pair(one) for one in found):
            raise ConfigError(
                f"task.test_data={self._config.test_data} returned a pair of pairs: it must "
                "return only the test examples, such as (inputs, targets)"
            )
        return found

    def _given(self, of_client: Mapping[str, Any]) -> tuple[Any, Any]:
        config, known = self._config, {**self._known, **of_client}
        parameters = inspect.signature(self._functions.data).parameters
        for name in ("path", "target"):
            if name in known and name not in parameters:
                raise ConfigError(
                    f"task.{name}={known[name]}: task.data={config.data} has no parameter "
                    f"{name}: set task.{name}=null, or give the function that parameter"
                )
        options, names = config.data_options or {}, (*CLIENT, "data_folder", *NAMED)
        given = call_with_known("task.data", self._functions.data, known, options, names=names)
        if not (isinstance(given, (tuple, list)) and len(given) == 2):
            raise ConfigError(
                f"task.data={config.data} returned a {type(given).__name__}: it must return "
                "(train, test); test may be None"
            )
        if given[0] is None or isinstance(given[0], str | Path | np.ndarray | Tensor):
            raise ConfigError(
                f"task.data={config.data} returned (train, test) with a "
                f"{type(given[0]).__name__} for train: it must be a pair (inputs, targets), a "
                "Dataset or a DataLoader, so return ((inputs, targets), test); test may be None"
            )
        return given[0], given[1]


def select(given: Any, rows: Indices) -> Any:
    """Return some rows of what a data function has returned."""
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
