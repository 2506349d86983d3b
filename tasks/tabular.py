"""Tables of your own, CSV or Parquet: numeric and categorical columns and a target, as arrays.

scikit-learn prepares the columns. A missing number becomes the column's mean, and numbers are
scaled to mean 0 and variance 1 (SimpleImputer, StandardScaler). Categories become one input each;
a missing value counts as a category if the public part has one, and a category that the public part
lacks becomes zeros (OneHotEncoder with ``handle_unknown="ignore"``). Columns and their statistics
come from a public part of the data alone, so that they are the same everywhere and no site's rows
have to be seen: the first rows of the training file, or a file of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.common.errors import ConfigError, DamagedFileError, require_range, require_types

if TYPE_CHECKING:  # pandas and scikit-learn take a second to import
    from pandas import DataFrame, Series

Arrays = tuple[NDArray[Any], NDArray[Any]]

_KEY = "task.data_options"
_SUFFIXES = (".csv", ".parquet")
_SPLIT_SEED = 0  # the same test rows whatever the run's seed


def load(
    *,
    target: str | None = None,
    path: str | None = None,
    numeric: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    public: int | str = 100,
    test_fraction: float = 0.2,
    kind: str = "classification",
    classes: Sequence[str] | None = None,
    data_folder: Path | None = None,
) -> tuple[Arrays, Arrays | None]:
    """Return training and test rows, each as inputs (n, d) and targets (n,).

    Args:
        target: column of the class or, for a regression, of the number to predict.
        path: a file, of which a random ``test_fraction`` becomes the test, or a folder with train
            and, if there is one, test (.csv or .parquet).
        numeric: columns of numbers; None: the others that hold only numbers.
        categorical: columns of categories; None: all others.
        public: the part that columns and statistics come from: so many first training rows, or the
            path of a file that is the same at all sites.
        test_fraction: of the one file, always the same rows.
        kind: classification or regression.
        classes: the values of ``target`` in the order of their labels.
        data_folder: of a site (``partition=site``), as ``path``; the server, which has none, gets
            inputs without rows.

    Raises:
        ConfigError: for a missing file or column, a value that is no number in a numeric column, a
            class that ``classes`` lacks, or a missing target.
    """
    _check(target, path, numeric, categorical, public, test_fraction)
    folder = data_folder or (None if path is None else Path(path).expanduser())
    if data_folder is not None and not isinstance(public, str):
        raise ConfigError(
            f"{_KEY}.public={public}: with partition=site the sites must agree on the columns' "
            "statistics; name a file with public rows, at the same path everywhere"
        )
    if folder is None and not isinstance(public, str):
        raise ConfigError(f"{_KEY}.path=null: name the file or folder of the table")
    files = {} if folder is None else _files(folder)
    train = _read(files["train"]) if "train" in files else None
    shown = _read(Path(public).expanduser()) if isinstance(public, str) else None
    if shown is None:
        assert train is not None
        shown = train.head(int(public))
    columns = Columns.fitted(shown, str(target), numeric, categorical, kind, classes)
    if train is None:
        return columns.arrays(shown.head(0)), None
    if "test" in files:
        return columns.arrays(train), columns.arrays(_read(files["test"]))
    if data_folder is not None:
        return columns.arrays(train), None  # partition.holdout holds out some
    inputs, targets = columns.arrays(train)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(targets))
    size = round(test_fraction * len(targets))
    test, rest = np.sort(order[:size]), np.sort(order[size:])
    return (inputs[rest], targets[rest]), (inputs[test], targets[test])


def load_test(
    *,
    target: str | None = None,
    path: str | None = None,
    numeric: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    public: int | str = 100,
    kind: str = "classification",
    classes: Sequence[str] | None = None,
) -> Arrays:
    """Return the server's test rows, beside sites with their own: ``task.test_data`` names this.

    The arguments are those of :func:`load`. The rows are those of ``path``'s test file or, without
    one, all of it.
    """
    train, test = load(
        target=target,
        path=path,
        numeric=numeric,
        categorical=categorical,
        public=public,
        test_fraction=0.0,
        kind=kind,
        classes=classes,
    )
    return train if test is None or len(test[1]) == 0 else test


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
        mean: of a regression's targets, added to the output.
        std: of a regression's targets, which the output is multiplied with, so that a target far
            from 0 and 1 needs no other step size.
    """
    require_types("task.model_options", {"hidden": hidden}, {"hidden": tuple[int, ...]})
    require_range("task.model_options.std", std, open_low=True)
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


@dataclass(frozen=True)
class Columns:
    """The columns of a table and what was fitted on its public part.

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
    labels: Mapping[str, int] | None

    @classmethod
    def fitted(
        cls,
        public: DataFrame,
        target: str,
        numeric: Sequence[str] | None,
        categorical: Sequence[str] | None,
        kind: str,
        classes: Sequence[str] | None,
    ) -> Columns:
        """Return the columns that a public part of a table tells."""
        if len(public) == 0:
            raise ConfigError(f"{_KEY}.public: there is no row to fit the columns on")
        if kind == "classification" and classes is None:
            raise ConfigError(
                "task.classes=null: list the classes, the values of the target, or set "
                "task.num_classes if they are 0, 1, ..."
            )
        labels = (
            None if kind == "regression" else {str(one): n for n, one in enumerate(classes or ())}
        )
        named = [target, *(numeric or ()), *(categorical or ())]
        if twice := {name for name in named if named.count(name) > 1}:
            raise ConfigError(f"{_KEY} names the column {', '.join(sorted(twice))} twice")
        rest = [name for name in public.columns if name not in named]
        if numeric is None:
            numeric = [name for name in rest if _holds_numbers(public[name])]
        if categorical is None:
            categorical = [name for name in rest if name not in numeric]
        if not numeric and not categorical:
            raise ConfigError(f"{_KEY}: the table has no column beside {target}")
        transformer = _transformer(list(numeric), list(categorical))
        found = cls(target, tuple(numeric), tuple(categorical), transformer, labels)
        found.transformer.fit(found._prepared(public))
        return found

    def arrays(self, table: DataFrame) -> Arrays:
        """Return inputs (n, d) as float32 and targets (n,) of a table's rows."""
        width = len(self.transformer.get_feature_names_out())
        prepared, targets = self._prepared(table), self._targets(table)
        if len(table) == 0:
            return np.zeros((0, width), dtype=np.float32), targets
        self._tell_unknown(prepared)
        return np.asarray(self.transformer.transform(prepared), dtype=np.float32), targets

    def _prepared(self, table: DataFrame) -> DataFrame:
        """Return the columns with numbers as float64 and categories as text or None."""
        import pandas

        _require_columns(table, (*self.numeric, *self.categorical))
        numbers = {name: _numbers(table, name) for name in self.numeric}
        categories = {
            name: pandas.Series(_texts(table[name]), dtype=object) for name in self.categorical
        }
        return pandas.DataFrame({**numbers, **categories})

    def _targets(self, table: DataFrame) -> NDArray[Any]:
        _require_columns(table, (self.target,))
        missing = int(table[self.target].isna().sum())
        if missing:
            raise ConfigError(
                f"{_where(table)}: {missing} of the {len(table)} rows have no {self.target} "
                f"({_KEY}.target): remove them"
            )
        if self.labels is None:
            return _numbers(table, self.target)
        texts = _texts(table[self.target])
        if unknown := sorted(set(texts) - set(self.labels)):
            raise ConfigError(
                f"{_where(table)}: the column {self.target} has {', '.join(unknown[:5])}, and "
                f"task.classes has {', '.join(self.labels)}"
            )
        return np.array([self.labels[text] for text in texts], dtype=np.int64)

    def _tell_unknown(self, prepared: DataFrame) -> None:
        """Log how many values become zeros because the public part does not have them."""
        if not self.categorical:
            return
        known = self.transformer.named_transformers_["categorical"].categories_
        for name, categories in zip(self.categorical, known, strict=True):
            unknown = int((~prepared[name].isin(list(categories))).sum())
            if unknown:
                getLogger("flwr").log(
                    WARNING,
                    "column %s: %s of %s values are not among the public part's; they become zeros",
                    name,
                    unknown,
                    len(prepared),
                )


def _transformer(numeric: list[str], categorical: list[str]) -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    scaled = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    parts = [("numeric", scaled, numeric), ("categorical", one_hot, categorical)]
    return ColumnTransformer(parts, sparse_threshold=0)


def _check(
    target: object,
    path: object,
    numeric: object,
    categorical: object,
    public: object,
    test_fraction: float,
) -> None:
    texts = {"target": target, "path": path}
    names = {"numeric": numeric, "categorical": categorical}
    require_types(_KEY, texts, dict.fromkeys(texts, str | None))
    require_types(_KEY, names, dict.fromkeys(names, tuple[str, ...] | None))
    require_types(_KEY, {"public": public}, {"public": int | str})
    require_range(f"{_KEY}.test_fraction", test_fraction, high=1.0, open_high=True)
    if target is None:
        raise ConfigError(f"{_KEY}.target=null: name the column that is predicted")


def _files(path: Path) -> dict[str, Path]:
    """Return the file of each split, by its name."""
    if path.is_file():
        return {"train": path}
    files = {
        split: path / f"{split}{suffix}"
        for split in ("train", "test")
        for suffix in _SUFFIXES
        if (path / f"{split}{suffix}").is_file()
    }
    if "train" not in files:
        raise ConfigError(
            f"{path} is neither a table nor a folder with train.csv or train.parquet: change "
            f"{_KEY}.path, or with partition=site the node config's data-folder"
        )
    return files


def _read(path: Path) -> DataFrame:
    """Return a table: of CSV, texts as they are there; of Parquet, its own types."""
    import pandas

    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path} must end in {' or '.join(_SUFFIXES)}")
    try:
        if path.suffix == ".csv":
            table = pandas.read_csv(path, dtype="string")
        else:
            table = pandas.read_parquet(path, dtype_backend="numpy_nullable")
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: change {_KEY}.path or .public") from None
    except (OSError, ValueError) as error:  # pandas' and Arrow's own are among them
        raise DamagedFileError(f"{path} cannot be read as a table: {error}") from None
    table.attrs["path"] = str(path)
    return table


def _where(table: DataFrame) -> str:
    return str(table.attrs.get("path", "the table"))


def _require_columns(table: DataFrame, names: Sequence[str]) -> None:
    for name in names:
        if name not in table.columns:
            raise ConfigError(
                f"{_where(table)} has no column {name} ({_KEY}); it has: "
                f"{', '.join(map(str, table.columns))}"
            )


def _holds_numbers(column: Series[Any]) -> bool:
    from pandas import to_numeric
    from pandas.api.types import is_bool_dtype

    if is_bool_dtype(column) or column.isna().all():
        return False
    try:
        to_numeric(column)
    except (TypeError, ValueError):
        return False
    return True


def _numbers(table: DataFrame, name: str) -> NDArray[np.float64]:
    """Return a column (n,), NaN where a value is missing."""
    from pandas import to_numeric

    try:
        numbers = to_numeric(table[name]).astype("Float64")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{_where(table)}: the column {name} is numeric and has another value: {error}. Put it "
            f"into {_KEY}.categorical, or mend the file"
        ) from None
    found: NDArray[np.float64] = numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isinf(found).any():
        raise ConfigError(f"{_where(table)}: the column {name} has an infinite value")
    return found


def _texts(column: Series[Any]) -> NDArray[Any]:
    """Return a column (n,) as text, None where a value is missing."""
    texts: NDArray[Any] = column.astype("string").to_numpy(dtype=object, na_value=None)
    return texts
