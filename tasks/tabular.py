"""Tables of your own, CSV or Parquet: numeric and categorical columns and a target, as arrays.

scikit-learn prepares the columns. A missing number becomes the column's mean, and numbers are
scaled to mean 0 and variance 1 (SimpleImputer, StandardScaler). Categories become one input each;
a missing value counts as a category if the fitted rows have one, and a category that they lack
becomes zeros (OneHotEncoder with ``handle_unknown="ignore"``). What the columns are fitted on is
``fit``: all training rows of the file that everybody reads ("all", for a simulation), a public part
("public"), or the rows of sites that nobody else reads ("federated"): each sends the statistics of
its training rows before round 1 (tasks/column_statistics.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.common.configured import Configured, InCode, Key, refusal, signature_of
from fedhet.common.errors import (
    ConfigError,
    is_list,
    require_finite,
    require_range,
    require_whole,
)
from fedhet.common.kinds import Count, ShareBelowOne, Text
from fedhet.common.text_files import Dialect
from fedhet.tasks.column_statistics import ColumnStatistics
from fedhet.tasks.config import OwnConfig
from fedhet.tasks.table_columns import KEY, Arrays, Columns, class_values, labels_of, names_in
from fedhet.tasks.tables import SITE, Tables, read_table, require_columns, row_in_file

if TYPE_CHECKING:  # pandas takes a second to import
    from pandas import DataFrame

REFERENCE = "fedhet.tasks.tabular:load"
PUBLIC_ROWS = 100
DIALECT = {"separator": ",", "decimal": ".", "encoding": None}  # the usual one of a CSV file
Rows = tuple[NDArray[Any], ...]  # inputs, targets and, if they are known, the rows' clients


class Table(Configured):
    """A table, and how its columns are read."""

    section = KEY

    target: Annotated[Text, Key("task.target")]
    """column of the class or, for a regression, of the number to predict"""
    path: Annotated[Text | None, Key("task.path")] = None
    """a file, a random ``test_fraction`` of which is for testing; a folder with train and perhaps
    test (.csv or .parquet); or a folder with a file for each site"""
    client_column: Annotated[Text | None, Key("task.client_column")] = None
    """column that says whose a row is; it is no input unless it is listed as one"""
    numeric: Sequence[Text] | None = None
    """columns of numbers; None: the others that hold only numbers"""
    categorical: Sequence[Text] | None = None
    """columns of categories; None: all others"""
    fit: Literal["all", "public", "federated"] | None = None
    """what the columns are fitted on: all training rows of the file ("all"), the ``public`` part,
    or the training rows of all sites ("federated"), which needs ``numeric`` and ``categorical``;
    None: the public part if ``public`` is given, else all"""
    public: Count | Text | None = None
    """the part that columns and statistics come from: a number of first rows, or the path of a
    file that is the same at all sites; None: 100 rows. If ``test_fraction`` divides one file, test
    rows are among the first ones; their targets are not read"""
    test_fraction: ShareBelowOne = 0.2
    """share of the one file, always the same rows"""
    separator: str = ","
    """what stands between two fields of a CSV file: ,  ;  tab  or |"""
    decimal: str = "."
    """the decimal point of a CSV file's numbers: point or comma"""
    encoding: str | None = None
    """of a CSV file, such as latin-1; None: UTF-8, or as its byte order mark says"""
    kind: Text = "classification"
    """classification or regression"""
    classes: Annotated[Sequence[str] | None, InCode()] = None
    """the values of ``target`` in the order of their labels"""
    data_folder: Annotated[Path | None, InCode()] = None
    """a site's folder or file (``partition=site``), in place of ``path``; the server has none and
    gets inputs without rows"""
    fitted: Annotated[str | None, InCode()] = None
    """the sites' combined statistics (``ColumnStatistics.to_json``). Before they exist, a federated
    fit gives each row its number as the only input, (n, 1)"""

    def check_together(self) -> None:
        """Reject a dialect that there is not; choose what the columns are fitted on."""
        self.dialect = Dialect(self.separator, self.decimal, self.encoding, KEY)
        self.fit = self.fit or ("all" if self.public is None else "public")

    @cached_property
    def tables(self) -> Tables | None:
        """The files; None at the server of sites with their own."""
        column = self.client_column
        if self.data_folder is not None:  # partition.holdout holds out a site's rows
            return Tables(self.data_folder, self.dialect, 0.0, column)
        if self.path is None:
            return None
        return Tables(Path(self.path).expanduser(), self.dialect, self.test_fraction, column)

    @property
    def files(self) -> Tables:
        """The files; without any, a ConfigError."""
        if self.tables is None:
            raise ConfigError("task.path=null: name the file or folder of the table")
        return self.tables

    def rows(self) -> tuple[Rows, Rows | None]:
        """Return what :func:`load` returns."""
        labels = labels_of(self.kind, self.classes)
        if self.fit != "federated":
            columns = Columns.named(self.target, *self.names, labels).fit(self.shown)
        elif self.fitted is None:
            return self._numbered(Columns.named(*self.federated_names(), labels))
        else:
            statistics = ColumnStatistics.from_json(self.fitted)
            columns = Columns.of_statistics(statistics, *self.federated_names(), labels)
        if self.tables is None:
            return columns.no_rows(), None
        train, test = self.tables.train, self.tables.test
        return self._with_clients(columns.arrays(train), train), (
            None if test is None else self._with_clients(columns.arrays(test), test)
        )

    def federated_names(self) -> tuple[str, Sequence[str], Sequence[str]]:
        """Return the columns of a federated fit, which a site cannot find out from its rows."""
        if self.numeric is None or self.categorical is None:
            raise ConfigError(
                f"{KEY}.fit=federated: the sites must agree on the columns; list them in "
                f"{KEY}.numeric and {KEY}.categorical ([]: none)"
            )
        return self.target, self.numeric, self.categorical

    @cached_property
    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        """The numeric and the categorical columns; those that are not named are found."""
        return names_in(self.shown, self.target, self.numeric, self.categorical, self.owner_column)

    @cached_property
    def shown(self) -> DataFrame:
        """The rows that the columns are fitted on."""
        if self.fit == "public" and isinstance(self.public, str):
            return read_table(Path(self.public).expanduser(), self.dialect, f"{KEY}.public")
        if self.data_folder is not None:
            raise ConfigError(
                f"{KEY}.fit={self.fit}: with partition=site the sites must agree on the columns' "
                f"statistics; set {KEY}.fit=federated, or {KEY}.fit=public with {KEY}.public "
                "naming a file with public rows, at the same path everywhere"
            )
        if self.fit == "public":
            return self.files.whole.head(int(self.public or PUBLIC_ROWS))
        return self.files.train

    @property
    def owner_column(self) -> str | None:
        """The column that says whose a row is."""
        of_sites = self.tables and self.data_folder is None and self.tables.has_clients
        return self.client_column or (SITE if of_sites else None)

    def _with_clients(self, rows: Arrays, table: DataFrame) -> Rows:
        """Add the rows' clients, if the table has them and they are asked for."""
        column = self.owner_column
        if column is None or self.data_folder is not None:
            return rows
        require_columns(table, (column,), "task.client_column")
        clients = table[column].astype("string")
        if clients.isna().any():
            file, row = row_in_file(table, int(np.argmax(clients.isna())))
            raise ConfigError(
                f"{file}: row {row} has no {column} (task.client_column): whose is "
                "it? Fill it, or remove the row"
            )
        return *rows, clients.to_numpy(dtype=str)

    def _numbered(self, columns: Columns) -> tuple[Rows, Rows | None]:
        """Return each row's number as its input, and the targets unchanged."""
        if self.tables is None:
            return (np.zeros((0, 1), dtype=np.int64), np.zeros(0)), None

        def rows(table: DataFrame) -> Rows:
            return self._with_clients(
                (np.arange(len(table))[:, None], columns.targets(table)), table
            )

        train, test = self.tables.train, self.tables.test
        return rows(train), None if test is None else rows(test)


def load(**given: Any) -> tuple[Rows, Rows | None]:
    """Return training and test rows, each as inputs (n, d), targets (n,) and perhaps clients (n,).

    The arguments are those of :class:`Table`.

    Raises:
        ConfigError: for a missing file or column, a value in a numeric column that is not a number,
            a class that ``classes`` lacks, or a missing target.
    """
    return Table(**given).rows()


def load_test(**given: Any) -> Rows:
    """Return the server's test rows when sites have their own data: for ``task.test_data``.

    The rows come from ``path``'s test file or, without one, from all of it.
    """
    train, test = load(**{**given, "test_fraction": 0.0})
    return (train if test is None or len(test[1]) == 0 else test)[:2]


load.__signature__ = load_test.__signature__ = signature_of(Table)  # type: ignore[attr-defined]


def inferred(config: OwnConfig) -> OwnConfig:
    """Return a task with what its file tells: the columns, and the classes.

    A task whose table only the sites have stays as it is.
    """
    if config.path is None or config.target is None:
        return config
    table = Table(**config.arguments)
    values: dict[str, Any] = {}
    if config.kind == "classification" and config.class_names is None:
        values["classes"] = class_values(table.files.whole, table.target)
    if table.fit != "federated":
        numeric, categorical = table.names
        names = {"numeric": list(numeric), "categorical": list(categorical)}
        values["data_options"] = {**(config.data_options or {}), **names}
    return config.model_copy(update=values)


def described(config: OwnConfig) -> list[str]:
    """Return lines that say how an inferred table is read."""
    options = config.data_options or {}
    if config.path is None or options.get("numeric") is None:
        return []
    table = Table(**config.arguments)
    files, owners = table.files, table.owner_column
    train, test = files.train, files.test
    rows = f"{len(train)} rows to train on, {0 if test is None else len(test)} to test on"
    names = config.class_names
    what = "a number" if names is None else f"one of {', '.join(names)}"
    lines = [f"{config.path}: {rows}; {config.target} (task.target) is {what}"]
    for key, kind in (("numeric", "numbers"), ("categorical", "categories")):
        found = ", ".join(map(str, options.get(key) or ())) or "none"
        lines.append(f"{config.path}: {kind} ({KEY}.{key}): {found}")
    if owners in files.whole.columns:
        count = files.whole[owners].nunique()
        lines.append(f"{config.path}: {owners} (task.client_column) has {count} values")
    return lines


def site_name(options: Mapping[str, Any], data_folder: Path) -> str | None:
    """Return the one value of ``client_column`` in a site's table; None if there are several."""
    train = Table(**options, data_folder=data_folder).files.train
    column = options["client_column"]
    if column not in train.columns:
        return None
    names = train[column].dropna().astype("string").unique().tolist()
    return str(names[0]) if len(names) == 1 else None


def statistics_of(
    rows: NDArray[np.int64], options: Mapping[str, Any], data_folder: Path | None
) -> ColumnStatistics:
    """Return a site's statistics of its training rows, for a federated fit.

    Args:
        rows: the rows' numbers, as :func:`load` has returned them.
        options: the options of :func:`load`.
        data_folder: the site's folder, if it has one.
    """
    table = Table(**options, data_folder=data_folder)
    columns = Columns.named(*table.federated_names())
    return columns.statistics(table.files.train.iloc[rows])


def fitted_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that read another table as :func:`load` has read this one.

    These are the options of a federated fit, with the statistics of the rows that the columns were
    fitted on as "fitted". They are empty if a column has more categories than these can hold.
    """
    table = Table(**options)
    numeric, categorical = table.names
    try:
        columns = Columns.named(table.target, numeric, categorical)
        fitted = columns.statistics(table.shown).to_json()
    except ValueError:  # also a ConfigError, and the error of a sum that is not a float64
        return {}
    names = {"numeric": list(numeric), "categorical": list(categorical)}
    return {"fit": "federated", **names, "fitted": fitted}


def mlp(
    input_shape: Sequence[int],
    outputs: int,
    hidden: Sequence[int] = (64, 32),
    mean: float = 0.0,
    std: float = 1.0,
) -> nn.Module:
    """Return a multilayer perceptron: linear layers with ReLU between.

    Args:
        input_shape: (d,).
        outputs: C, or 1 for a regression.
        hidden: the layers' widths.
        mean: mean of a regression's targets, added to the output.
        std: standard deviation of a regression's targets, a factor of the output. So Adam needs no
            other step size if targets are far from 0 and 1; divide that of SGD by std^2.
    """
    if not is_list(hidden):
        raise ConfigError(refusal("task.model_options.hidden", hidden, list[int]))
    for width in hidden:
        require_whole("task.model_options.hidden", width, low=1)
    require_finite("task.model_options.mean", mean)
    require_range("task.model_options.std", std, open_low=True, open_high=True)
    sizes = [*input_shape, *hidden]
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    layers.append(nn.Linear(sizes[-1], outputs))
    if (mean, std) != (0.0, 1.0):
        layers.append(Rescale(mean, std))
    return nn.Sequential(*layers)


class Rescale(nn.Module):
    """Maps outputs of mean 0 and variance 1 to the targets' own unit."""

    def __init__(self, mean: float, std: float) -> None:
        super().__init__()
        self._mean, self._std = mean, std

    def forward(self, outputs: Tensor) -> Tensor:
        """Return outputs (B, k) in the unit of the targets."""
        return outputs * self._std + self._mean
