"""Tables of your own, CSV or Parquet: numeric and categorical columns and a target, as arrays.

scikit-learn prepares the columns. A missing number becomes the column's mean, and numbers are
scaled to mean 0 and variance 1 (SimpleImputer, StandardScaler). Categories become one input each;
a missing value counts as a category if the public part has one, and a category that the public part
lacks becomes zeros (OneHotEncoder with ``handle_unknown="ignore"``). By default the columns and
their statistics come only from a public part of the data: the first rows of the file (in a folder,
the training file), or a separate file. With ``fit="federated"`` they come from the rows of all
sites: each sends the statistics of its training rows before round 1 (tasks/column_statistics.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from fedhet.common.errors import (
    ConfigError,
    DamagedFileError,
    SetupError,
    require_choice,
    require_finite,
    require_range,
    require_types,
    require_whole,
)
from fedhet.tasks.column_statistics import ColumnStatistics
from fedhet.tasks.table_columns import KEY, Arrays, Columns, names_in

if TYPE_CHECKING:  # pandas takes a second to import
    from pandas import DataFrame

_SUFFIXES = (".csv", ".parquet")
FITS = ("public", "federated")
_SPLIT_SEED = 0  # the same test rows whatever the run's seed


def load(
    *,
    target: str | None = None,
    path: str | None = None,
    numeric: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    fit: str = "public",
    public: int | str = 100,
    test_fraction: float = 0.2,
    kind: str = "classification",
    classes: Sequence[str] | None = None,
    data_folder: Path | None = None,
    fitted: str | None = None,
) -> tuple[Arrays, Arrays | None]:
    """Return training and test rows, each as inputs (n, d) and targets (n,).

    Args:
        target: column of the class or, for a regression, of the number to predict.
        path: a file, a random ``test_fraction`` of which is for testing, or a folder with train
            and perhaps test (.csv or .parquet).
        numeric: columns of numbers; None: the others that hold only numbers.
        categorical: columns of categories; None: all others.
        fit: what the columns are fitted on: the ``public`` part, or the training rows of all sites
            ("federated"), which needs ``numeric`` and ``categorical``.
        public: the part that columns and statistics come from: a number of first rows, or the path
            of a file that is the same at all sites. If ``test_fraction`` divides one file, test
            rows are among the first ones; their targets are not read.
        test_fraction: share of the one file, always the same rows.
        kind: classification or regression.
        classes: the values of ``target`` in the order of their labels.
        data_folder: a site's folder (``partition=site``), in place of ``path``; the server has none
            and gets inputs without rows.
        fitted: the sites' combined statistics (``ColumnStatistics.to_json``). Before they exist, a
            federated fit gives each row its number as the only input, (n, 1).

    Raises:
        ConfigError: for a missing file or column, a value in a numeric column that is not a number,
            a class that ``classes`` lacks, or a missing target.
    """
    _check(target, path, numeric, categorical, fit, public, test_fraction)
    train, test, whole = _tables(path, data_folder, test_fraction)
    if fit == "federated":
        names = _names(target, numeric, categorical)
        if fitted is None:
            return _numbered(Columns.named(*names, kind, classes), train, test)
        columns = Columns.of_statistics(ColumnStatistics.from_json(fitted), *names, kind, classes)
    else:
        shown = _public_part(public, whole, data_folder)
        columns = Columns.fitted(shown, str(target), numeric, categorical, kind, classes)
    if train is None:
        return columns.no_rows(), None
    return columns.arrays(train), None if test is None else columns.arrays(test)


def load_test(
    *,
    target: str | None = None,
    path: str | None = None,
    numeric: Sequence[str] | None = None,
    categorical: Sequence[str] | None = None,
    fit: str = "public",
    public: int | str = 100,
    kind: str = "classification",
    classes: Sequence[str] | None = None,
    fitted: str | None = None,
) -> Arrays:
    """Return the server's test rows when sites have their own data: for ``task.test_data``.

    The arguments are those of :func:`load`. The rows come from ``path``'s test file or, without
    one, from all of it.
    """
    train, test = load(
        target=target,
        path=path,
        numeric=numeric,
        categorical=categorical,
        fit=fit,
        public=public,
        test_fraction=0.0,
        kind=kind,
        classes=classes,
        fitted=fitted,
    )
    return train if test is None or len(test[1]) == 0 else test


def statistics_of(
    rows: NDArray[np.int64], options: Mapping[str, Any], data_folder: Path | None
) -> ColumnStatistics:
    """Return a site's statistics of its training rows, for a federated fit.

    Args:
        rows: the rows' numbers, as :func:`load` has returned them.
        options: the options of :func:`load`.
        data_folder: the site's folder, if it has one.
    """
    path, fraction = options.get("path"), float(options.get("test_fraction", 0.2))
    train, _, _ = _tables(path, data_folder, fraction)
    if train is None:
        raise ConfigError(f"{KEY}.path=null: name the file or folder of the table")
    names = _names(*(options.get(key) for key in ("target", "numeric", "categorical")))
    return Columns.named(*names, "regression", None).statistics(train.iloc[rows])


def columns_of_public_part(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that read another table as :func:`load` has read this one.

    These are the options of a federated fit, with the public part's statistics as "fitted". They
    are empty if a column has more categories than the statistics can hold.
    """
    target, path = str(options.get("target")), options.get("path")
    public = options.get("public", 100)
    whole = None
    if path is not None and not isinstance(public, str):
        whole = _read(_files(Path(path).expanduser())["train"], public)
    shown = _public_part(public, whole, None)
    numeric, categorical = names_in(
        shown, target, options.get("numeric"), options.get("categorical")
    )
    try:
        found = Columns.named(target, numeric, categorical, "regression", None).statistics(shown)
        fitted = found.to_json()
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
    require_types("task.model_options", {"hidden": hidden}, {"hidden": tuple[int, ...]})
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


def _check(
    target: object,
    path: object,
    numeric: object,
    categorical: object,
    fit: object,
    public: int | str,
    test_fraction: float,
) -> None:
    texts = {"target": target, "path": path}
    names = {"numeric": numeric, "categorical": categorical}
    require_types(KEY, texts, dict.fromkeys(texts, str | None))
    require_types(KEY, names, dict.fromkeys(names, tuple[str, ...] | None))
    require_types(KEY, {"fit": fit, "public": public}, {"fit": str, "public": int | str})
    if not isinstance(public, str):
        require_whole(f"{KEY}.public", public, low=1)
    require_choice(f"{KEY}.fit", str(fit), FITS)
    require_range(f"{KEY}.test_fraction", test_fraction, high=1.0, open_high=True)
    if target is None:
        raise ConfigError(f"{KEY}.target=null: name the column to predict")


def _names(
    target: str | None, numeric: Sequence[str] | None, categorical: Sequence[str] | None
) -> tuple[str, Sequence[str], Sequence[str]]:
    """Return the columns of a federated fit, which a site cannot find out from its rows."""
    if numeric is None or categorical is None:
        raise ConfigError(
            f"{KEY}.fit=federated: the sites must agree on the columns; list them in {KEY}.numeric "
            f"and {KEY}.categorical ([]: none)"
        )
    return str(target), numeric, categorical


def _tables(
    path: str | None, data_folder: Path | None, test_fraction: float
) -> tuple[DataFrame | None, DataFrame | None, DataFrame | None]:
    """Return the training rows, the test rows, and the training file before the split.

    Each is None without a file. Without a test file, partition.holdout holds out a site's rows.
    """
    folder = data_folder or (None if path is None else Path(path).expanduser())
    if folder is None:
        return None, None, None
    files = _files(folder)
    whole = _read(files["train"])
    if "test" in files:
        return whole, _read(files["test"]), whole
    if data_folder is not None or test_fraction == 0:
        return whole, None, whole
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(whole))
    size = round(test_fraction * len(whole))
    test, rest = np.sort(order[:size]), np.sort(order[size:])
    return whole.iloc[rest], whole.iloc[test], whole


def _public_part(public: int | str, whole: DataFrame | None, data_folder: Path | None) -> DataFrame:
    if isinstance(public, str):
        return _read(Path(public).expanduser())
    if data_folder is not None:
        raise ConfigError(
            f"{KEY}.public={public}: with partition=site the sites must agree on the columns' "
            "statistics; name a file with public rows, at the same path everywhere, or set "
            f"{KEY}.fit=federated"
        )
    if whole is None:
        raise ConfigError(f"{KEY}.path=null: name the file or folder of the table")
    return whole.head(public)


def _numbered(
    columns: Columns, train: DataFrame | None, test: DataFrame | None
) -> tuple[Arrays, Arrays | None]:
    """Return each row's number as its input, and the targets unchanged."""

    def rows(table: DataFrame) -> Arrays:
        return np.arange(len(table))[:, None], columns.targets(table)

    if train is None:
        return (np.zeros((0, 1), dtype=np.int64), np.zeros(0)), None
    return rows(train), None if test is None else rows(test)


def _files(path: Path) -> dict[str, Path]:
    """Return the file of each split, by its name."""
    if path.is_file():
        return {"train": path}
    if not path.exists():
        raise SetupError(
            f"{path} does not exist (from {Path.cwd()}): change {KEY}.path, or with partition=site "
            "the node config's data-folder"
        )
    files: dict[str, Path] = {}
    for split in ("train", "test"):
        found = [one for suffix in _SUFFIXES if (one := path / f"{split}{suffix}").is_file()]
        if len(found) > 1:
            raise ConfigError(f"{found[0]} and {found[1].name} are both there: keep one of them")
        if found:
            files[split] = found[0]
    if "train" not in files:
        raise SetupError(
            f"{path} is neither a table nor a folder with train.csv or train.parquet: change "
            f"{KEY}.path, or with partition=site the node config's data-folder"
        )
    return files


def _read(path: Path, rows: int | None = None) -> DataFrame:
    """Return a table: from CSV its texts, from Parquet its own types.

    ``rows``: the number of first rows that are needed.
    """
    import pandas

    if path.suffix not in _SUFFIXES:
        raise ConfigError(f"{path} must end in {' or '.join(_SUFFIXES)}")
    try:
        if path.suffix == ".csv":
            table = _read_csv(path, rows)
        else:
            table = pandas.read_parquet(path, dtype_backend="numpy_nullable")
    except FileNotFoundError:
        raise SetupError(f"{path} does not exist: change {KEY}.path or .public") from None
    except (OSError, ValueError) as error:  # includes pandas' and Arrow's own
        said = " ".join(str(error).split())  # in one line
        raise DamagedFileError(f"{path} cannot be read as a table: {said}") from None
    table = table.reset_index(drop=True)  # errors name a row by its place in the file
    table.attrs["path"] = str(path)
    return table


def _read_csv(path: Path, rows: int | None) -> DataFrame:
    """Return the texts of a file whose header names each column once.

    pandas itself would call columns "a.1" and "Unnamed: 0", and take the first column for an index
    if rows have more fields than the header.
    """
    import pandas

    header = pandas.read_csv(path, dtype="string", header=None, nrows=1, keep_default_na=False)
    names = header.iloc[0].tolist()
    if "" in names:
        raise ValueError(f"field {names.index('') + 1} of its header is empty: name or remove it")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"its header has {', '.join(twice)} twice")
    table = pandas.read_csv(path, dtype="string", nrows=rows)
    if not isinstance(table.index, pandas.RangeIndex):
        raise ValueError(f"its rows have more fields than its header, which has {len(names)}")
    return table
