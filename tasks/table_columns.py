"""The columns of a table as a model's inputs: numbers scaled, categories as one input each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from logging import INFO, WARNING, getLogger
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError
from fedhet.tasks.column_statistics import ColumnStatistics
from fedhet.tasks.tables import require_columns, row_in_file, where

if TYPE_CHECKING:  # pandas and scikit-learn take a second to import
    from pandas import DataFrame, Series

Arrays = tuple[NDArray[Any], NDArray[Any]]
Labels = dict[str, int] | None

KEY = "task.data_options"
_MOST_CLASSES = 100  # that a target is taken for, unless they are listed
_FEW = 20  # rows that tell nothing of what a column usually has
_MOST_NUMBERS, _MANY_DISTINCT, _MOST_DISTINCT = 0.9, 0.3, 0.9  # shares of a column's values
_WHOLE = re.compile(r"^(-?\d+)\.0$")


@dataclass(frozen=True)
class Columns:
    """The columns of a table, and transformers fitted to a public part or to all sites' rows.

    Attributes:
        target: the column to predict.
        numeric: columns of numbers.
        categorical: columns of categories.
        transformer: scikit-learn's, fitted.
        labels: the label of each class; None for a regression.
    """

    target: str
    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    transformer: Any
    labels: Labels

    @classmethod
    def of_statistics(
        cls,
        statistics: ColumnStatistics,
        target: str,
        numeric: Sequence[str],
        categorical: Sequence[str],
        labels: Labels = None,
    ) -> Columns:
        """Return the columns fitted to the rows that the statistics describe."""
        import pandas

        statistics.require(len(numeric), len(categorical))
        found = cls.named(target, numeric, categorical, labels)
        # Fit the transformer on a table with every category, then set the numbers' statistics.
        size = max(map(len, statistics.categories), default=1) or 1
        numbers = {name: np.zeros(size) for name in numeric}
        texts = {
            name: pandas.Series([*values, *values[:1] * (size - len(values))], dtype=object)
            for name, values in zip(categorical, statistics.categories, strict=True)
        }
        found.transformer.fit(pandas.DataFrame({**numbers, **texts}))
        if numeric:
            imputer, scaler = (
                step for _, step in found.transformer.named_transformers_["numeric"].steps
            )
            variances = statistics.variances()
            imputer.statistics_ = statistics.means
            scaler.mean_, scaler.var_ = statistics.means, variances
            scaler.scale_ = np.where(_constant(statistics), 1.0, np.sqrt(variances))
        return found

    @classmethod
    def named(
        cls,
        target: str,
        numeric: Sequence[str],
        categorical: Sequence[str],
        labels: Labels = None,
    ) -> Columns:
        """Return columns that are not fitted yet."""
        names = [target, *numeric, *categorical]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ConfigError(f"{KEY} names the column {', '.join(sorted(twice))} twice")
        if not numeric and not categorical:
            raise ConfigError(f"{KEY}: the table has no column beside {target}")
        transformer = _transformer(list(numeric), list(categorical))
        return cls(target, tuple(numeric), tuple(categorical), transformer, labels)

    def fit(self, table: DataFrame) -> Columns:
        """Fit the transformers to a table's rows."""
        self.transformer.fit(self.prepared(table))
        return self

    def inputs(self) -> list[dict[str, Any]]:
        """Describe each of a model's inputs (d,), in order.

        A number is the value of a ``column`` less ``mean`` over ``scale``; a missing value becomes
        the mean. Another input is 1 if a column has the ``category``, or no value (None), else 0.
        """
        parts = self.transformer.named_transformers_
        found: list[dict[str, Any]] = []
        if self.numeric:
            scaler = parts["numeric"].steps[-1][1]
            for name, mean, scale in zip(self.numeric, scaler.mean_, scaler.scale_, strict=True):
                found.append({"column": name, "mean": float(mean), "scale": float(scale)})
        if self.categorical:
            categories = parts["categorical"].categories_
            for name, values in zip(self.categorical, categories, strict=True):
                found += [{"column": name, "category": value} for value in values.tolist()]
        return found

    def statistics(self, table: DataFrame) -> ColumnStatistics:
        """Return the statistics of a table's rows."""
        return ColumnStatistics.of(self.prepared(table), self.numeric)

    def arrays(self, table: DataFrame) -> Arrays:
        """Return inputs (n, d) as float32 and targets (n,) of a table's rows."""
        if len(table) == 0:
            return self.no_rows()
        prepared, targets = self.prepared(table), self.targets(table)
        if self.categorical:
            known = self.transformer.named_transformers_["categorical"].categories_
            for name, categories in zip(self.categorical, known, strict=True):
                _tell_unknown(name, prepared[name], categories, f": fit on more rows ({KEY}.fit)")
        names = [one.partition("__")[2] for one in self.transformer.get_feature_names_out()]
        return _in_float32(self.transformer.transform(prepared), table, names), targets

    def no_rows(self) -> Arrays:
        """Return inputs (0, d) and targets (0,)."""
        width = len(self.transformer.get_feature_names_out())
        kind = np.float64 if self.labels is None else np.int64
        return np.zeros((0, width), dtype=np.float32), np.zeros(0, dtype=kind)

    def prepared(self, table: DataFrame) -> DataFrame:
        """Return the columns with numbers as float64 and categories as text or None."""
        import pandas

        require_columns(table, (*self.numeric, *self.categorical), KEY)
        cure = f"list it in {KEY}.categorical"
        numbers = {name: _numbers(table, name, cure) for name in self.numeric}
        categories = {
            name: pandas.Series(_categories(table[name]), dtype=object) for name in self.categorical
        }
        return pandas.DataFrame({**numbers, **categories})

    def targets(self, table: DataFrame) -> NDArray[Any]:
        """Return labels or, for a regression, numbers (n,)."""
        require_columns(table, (self.target,), "task.target")
        missing = int(table[self.target].isna().sum())
        if missing:
            raise ConfigError(
                f"{where(table)}: {missing} of the {len(table)} rows have no {self.target} "
                f"(task.target): remove them (in CSV files NA, None and the like mean missing)"
            )
        if self.labels is None:
            return _numbers(table, self.target, "set task.kind=classification and task.classes")
        whole = {one: n for one, n in self.labels.items() if one.removeprefix("-").isdecimal()}
        labels = {f"{one}.0": n for one, n in whole.items()} | self.labels
        texts = _texts(table[self.target])  # whole numbers become 1.0 if one is missing
        if unknown := sorted(set(texts) - set(labels)):
            raise ConfigError(
                f"{where(table)}: the column {self.target} has {', '.join(unknown[:5])}, but "
                f"task.classes has {', '.join(self.labels)}"
            )
        return np.array([labels[text] for text in texts], dtype=np.int64)


def labels_of(kind: str, classes: Sequence[str] | None) -> Labels:
    """Return the label of each class; None for a regression."""
    if kind == "regression":
        return None
    if classes is None:
        raise ConfigError(
            "task.classes=null: list the classes, the values of the target, or set "
            "task.num_classes if they are 0, 1, ..."
        )
    return {str(name): label for label, name in enumerate(classes)}


def described_inputs(table: DataFrame, inputs: Sequence[Mapping[str, Any]]) -> NDArray[np.float32]:
    """Return a model's inputs (n, d) of a table's rows, by the words of :meth:`Columns.inputs`."""
    names = [one["column"] for one in inputs]
    require_columns(table, names, "the model needs it")
    found = []
    for name, group in groupby(inputs, key=itemgetter("column")):
        words = list(group)
        if "category" in words[0]:
            values, categories = _categories(table[name]), [one["category"] for one in words]
            _tell_unknown(name, values, categories)
            found += [values == category for category in categories]
        else:
            [one] = words
            scaled = (_numbers(table, name, "empty the cell") - one["mean"]) / one["scale"]
            found.append(np.where(np.isnan(scaled), 0.0, scaled))
    return _in_float32(np.stack(found, axis=1), table, names)


def _in_float32(
    inputs: NDArray[Any], table: DataFrame, names: Sequence[str]
) -> NDArray[np.float32]:
    """Return inputs (n, d) in float32; reject a number that has none. ``names``: the columns."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.asarray(inputs, dtype=np.float32)
    if not np.isfinite(found).all():
        position, place = np.argwhere(~np.isfinite(found))[0]
        file, row = row_in_file(table, position)
        raise ConfigError(
            f"{file}: scaled, the column {names[place]} has no float32 in row {row}: too large a "
            "number, there or among those fitted"
        )
    return found


def _tell_unknown(name: str, values: Any, known: Sequence[Any], cure: str = "") -> None:
    """Log how many values become zeros because a column was fitted without them."""
    categories = set(known)
    unknown = sum(value not in categories for value in values)
    if unknown:
        getLogger("flwr").log(
            WARNING,
            "column %s: %s of %s values are not in the rows that the columns are fitted on, so "
            "they count as no category%s",
            name,
            unknown,
            len(values),
            cure,
        )


def names_in(
    table: DataFrame,
    target: str,
    numeric: Sequence[str] | None,
    categorical: Sequence[str] | None,
    client_column: str | None = None,
) -> tuple[Sequence[str], Sequence[str]]:
    """Return the numeric and categorical columns; the table's values give those that are None.

    Raises:
        ConfigError: for a column that holds numbers but for a few values, which somebody who can
            see them has to decide about.
    """
    if len(table) == 0:
        raise ConfigError(f"{where(table)} has no row to fit the columns on")
    require_columns(table, (target,), "task.target")
    named = [target, client_column, *(numeric or ()), *(categorical or ())]
    rest = [name for name in table.columns if name not in named]
    if nested := [name for name in rest if _is_nested(table[name])]:
        raise ConfigError(
            f"{where(table)}: the column {', '.join(nested)} holds lists or records: make a column "
            f"of each value, remove it, or list the others in {KEY}.numeric and {KEY}.categorical"
        )
    given = numeric is not None
    if numeric is None:
        numeric = [name for name in rest if _holds_numbers(table, name)]
        rest = [name for name in rest if name not in numeric]
    if categorical is None:
        distinct = {name: table[name].nunique() for name in rest}
        categorical = [name for name in rest if not _is_name(table[name], distinct[name])]
        if left := [name for name in rest if name not in categorical]:
            text = "%s: left out, because nearly each row has another value: %s (keep it: %s)"
            keys = f"{KEY}.categorical"
            getLogger("flwr").log(WARNING, text, where(table), ", ".join(left), keys)
        if given and categorical:
            text = "%s: taken as categories, because only %s.numeric is given: %s"
            getLogger("flwr").log(INFO, text, where(table), KEY, ", ".join(categorical))
        for name in categorical:
            _tell_many(table, name, distinct[name])
    for name in (target, *numeric):
        _tell_thousands(table, name)
    return numeric, categorical


def class_values(table: DataFrame, target: str) -> tuple[str, ...]:
    """Return the classes of a table's target: numbers ascending, or else texts in order."""
    require_columns(table, (target,), "task.target")
    found = {text for text in _categories(table[target]) if text is not None}
    if len(found) < 2:
        raise ConfigError(
            f"{where(table)}: the column {target} (task.target) has fewer than two different "
            "values: name another column, or list all classes in task.classes"
        )
    if len(found) > _MOST_CLASSES:
        raise ConfigError(
            f"{where(table)}: the column {target} (task.target) has {len(found)} different values: "
            "set task.kind=regression if they are numbers to predict, or list task.classes"
        )
    try:
        return tuple(sorted(found, key=lambda one: (float(one), one)))
    except ValueError:
        return tuple(sorted(found))


def _is_name(column: Series[Any], distinct: int) -> bool:
    """Return whether nearly each row has another value, as in a column of names."""
    return len(column) >= _FEW and distinct > _MOST_DISTINCT * column.count()


def _is_nested(column: Series[Any]) -> bool:
    """Return whether a column of a Parquet file holds lists or records."""
    first = column.first_valid_index() if column.dtype == object else None
    return first is not None and isinstance(column[first], list | dict | np.ndarray)


def _tell_many(table: DataFrame, name: str, distinct: int) -> None:
    """Warn of a column with so many categories that it may hold dates or measured values."""
    count = int(table[name].count())
    if count >= _FEW and distinct > _MANY_DISTINCT * count:
        text = "%s: %s is taken as categories and has %s in %s rows, each an input of the model: "
        text += "make a number of it (a date: days since some day), or leave it out of %s"
        keys = f"{KEY}.categorical"
        getLogger("flwr").log(WARNING, text, where(table), name, distinct, count, keys)


def _tell_thousands(table: DataFrame, name: str) -> None:
    """Warn of numbers in which the decimal point looks like a separator of thousands."""
    decimal = table.attrs.get("decimal", ".")
    if _has_thousands(table[name], decimal):
        text = "%s: each number of %s with a %r has three digits behind it, and others have none: "
        text += "if it separates thousands, write the numbers without it; it is read as the "
        text += "decimal point (%s.decimal)"
        getLogger("flwr").log(WARNING, text, where(table), name, decimal, KEY)


def _has_thousands(column: Series[Any], mark: str) -> bool:
    """Return whether some texts look like 1,250 and none with the ``mark`` like 0,125 or 1,25."""
    from pandas.api.types import is_string_dtype

    if not is_string_dtype(column):
        return False
    texts = column.dropna().astype("string")
    marked = texts[texts.str.contains(mark, regex=False)]
    grouped = rf"-?[1-9]\d{{0,2}}(?:{re.escape(mark)}\d{{3}})+"
    return 0 < len(marked) < len(texts) and bool(marked.str.fullmatch(grouped).all())


def _constant(statistics: ColumnStatistics) -> NDArray[np.bool_]:
    """Return which columns StandardScaler takes for constant, by its bound on rounding errors."""
    rows, eps = statistics.rows, np.finfo(np.float64).eps
    variances, means = statistics.variances(), statistics.means
    found: NDArray[np.bool_] = variances <= rows * eps * variances + (rows * means * eps) ** 2
    return found


def _transformer(numeric: list[str], categorical: list[str]) -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    scaled = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    parts = [("numeric", scaled, numeric), ("categorical", one_hot, categorical)]
    return ColumnTransformer(parts, sparse_threshold=0)


def _holds_numbers(table: DataFrame, name: str) -> bool:
    """Return whether a column is one of numbers; some values that are none must be said."""
    from pandas.api.types import is_bool_dtype

    column = table[name]
    if is_bool_dtype(column) or column.isna().all():
        return False
    given = column.notna().to_numpy()
    right = np.isfinite(_floats(table, name))
    if (right | ~given).all():
        return True
    count = int(given.sum())
    if count >= _FEW and right.sum() >= _MOST_NUMBERS * count:
        file, row = row_in_file(table, int(np.argmax(given & ~right)))
        raise ConfigError(
            f"{file}: the column {name} has numbers, but for row {row}"
            f"{_and_more(int((given & ~right).sum()))}: empty the cell if the value is missing, or "
            f"list the column in {KEY}.categorical"
        )
    other = "," if table.attrs.get("decimal", ".") == "." else "."
    if np.isfinite(_floats(table, name, other)).sum() >= _MOST_NUMBERS * count:
        if _has_thousands(column, other):
            raise ConfigError(
                f"{where(table)}: the column {name} looks like numbers with {other!r} between "
                f"thousands: write them without it, or list the column in {KEY}.categorical"
            )
        raise ConfigError(
            f"{where(table)}: the column {name} looks like numbers with the decimal point "
            f"{other!r}: set {KEY}.decimal={'comma' if other == ',' else 'point'}, or list the "
            f"column in {KEY}.categorical"
        )
    return False


def _and_more(wrong: int) -> str:
    return "" if wrong == 1 else f" and {wrong - 1} more"


def _floats(table: DataFrame, name: str, decimal: str | None = None) -> NDArray[np.float64]:
    """Return a column's numbers (n,), NaN where a value is missing or not a number."""
    from pandas import to_numeric
    from pandas.api.types import is_bool_dtype, is_string_dtype

    column = _seconds(table[name])
    decimal = decimal or table.attrs.get("decimal", ".")
    if is_bool_dtype(column):
        column = column.astype("Float64")
    elif is_string_dtype(column) or column.dtype == object:
        column = column.astype("string")
        if decimal != ".":
            column = column.where(~column.str.contains(".", regex=False, na=False))
            column = column.str.replace(decimal, ".", regex=False)
    numbers = to_numeric(column, errors="coerce").astype("Float64").mask(column.isna())  # NaT
    found: NDArray[np.float64] = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    return found


def _numbers(table: DataFrame, name: str, cure: str) -> NDArray[np.float64]:
    """Return a column (n,), NaN if a value is missing; errors about text suggest ``cure``."""
    found = _floats(table, name)
    other = np.isinf(found) | (np.isnan(found) & table[name].notna().to_numpy())
    if other.any():
        file, row = row_in_file(table, int(np.argmax(other)))  # no value: a site sends the error
        raise ConfigError(
            f"{file}: the column {name} is numeric, but has no finite number in row "
            f"{row}{_and_more(int(other.sum()))}: mend the file (nothing separates thousands), "
            f"{cure}, or set {KEY}.decimal if the file has another decimal point"
        )
    return found


def _seconds(column: Series[Any]) -> Series[Any]:
    """Return times as seconds since 1970 and durations as seconds; files differ in their unit."""
    from pandas import Timestamp
    from pandas.api.types import is_datetime64_any_dtype, is_timedelta64_dtype

    if is_datetime64_any_dtype(column):
        zero = Timestamp(0, tz="UTC" if column.dt.tz else None).as_unit(column.dt.unit)
        column = column - zero
    if is_timedelta64_dtype(column):
        column = column.dt.total_seconds()
    return column


def _categories(column: Series[Any]) -> NDArray[Any]:
    """Return a column (n,) as text, None if a value is missing.

    Programs write a whole number as 1.0 beside missing values; it stays the same category.
    """
    from pandas.api.types import is_float_dtype

    texts = _texts(column)
    if not is_float_dtype(column):  # the text of a CSV file
        texts[:] = [text and _WHOLE.sub(r"\1", text) for text in texts]
    else:
        numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
        whole = np.isfinite(numbers) & (numbers == np.floor(numbers))
        texts[whole] = [str(int(number)) for number in numbers[whole]]
    return texts


def _texts(column: Series[Any]) -> NDArray[Any]:
    """Return a column (n,) as text, None if a value is missing."""
    texts: NDArray[Any] = column.astype("string").to_numpy(dtype=object, na_value=None)
    return texts
