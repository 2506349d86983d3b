"""The rows of a table: one CSV or Parquet file, a folder with train and test, or a file a site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from logging import WARNING, getLogger
from pathlib import Path
from typing import TYPE_CHECKING

from fedhet.common.errors import ConfigError, DamagedFileError, SetupError
from fedhet.common.text_files import Dialect, read_csv, require_file
from fedhet.tasks.sources.arrays import SPLIT_SEED, random_split, stratified_split
from fedhet.tasks.sources.folders import files_in

if TYPE_CHECKING:  # pandas takes a second to import
    from pandas import DataFrame

SUFFIXES = (".csv", ".parquet")
SITE = "site"  # the column that a folder with a file a site gets, if task.client_column is null
_CURE = "change task.path, or with partition=site the node config's data-folder"


@dataclass(frozen=True)
class Tables:
    """The files at one place.

    Attributes:
        path: a file, a folder with train and perhaps test, or a folder with a file for each site.
        dialect: how CSV files are written.
        test_fraction: share of the rows to test on, always the same ones, if there is no test file;
            of each site's rows if ``client_column`` is there.
        client_column: the column that says whose a row is.
    """

    path: Path
    dialect: Dialect
    test_fraction: float = 0.2
    client_column: str | None = None

    @cached_property
    def whole(self) -> DataFrame:
        """The rows of the training file, before some are split off."""
        if "train" in self._files:
            return read_table(self._files["train"], self.dialect)
        return _joined(self._files, self.dialect, self.client_column or SITE)

    @cached_property
    def train(self) -> DataFrame:
        """The rows to train on."""
        return self._parts[0]

    @cached_property
    def test(self) -> DataFrame | None:
        """The rows to test on."""
        return self._parts[1]

    @property
    def has_clients(self) -> bool:
        """Whether there is a file for each site."""
        return "train" not in self._files

    @cached_property
    def _parts(self) -> tuple[DataFrame, DataFrame | None]:
        whole = self.whole
        if "train" in self._files and "test" in self._files:
            return whole, read_table(self._files["test"], self.dialect)
        if self.test_fraction == 0:
            return whole, None
        column = SITE if self.has_clients and self.client_column is None else self.client_column
        if column in whole.columns:
            sites = whole[column].astype("string").fillna("").to_numpy(dtype=str)
            rest, test = stratified_split(sites, self.test_fraction, SPLIT_SEED)
        else:
            rest, test = random_split(len(whole), self.test_fraction)
        return whole.iloc[rest], whole.iloc[test]

    @cached_property
    def _files(self) -> dict[str, Path]:
        """The files by what they are: train and test, or the sites' by their names."""
        path = self.path
        if path.is_file():
            return {"train": path}
        if not path.exists():
            raise SetupError(f"{path} does not exist (from {Path.cwd()}): {_CURE}")
        if not path.is_dir():
            require_file(path, "task.path")
        files: dict[str, Path] = {}
        for file in (one for one in files_in(path) if one.suffix.lower() in SUFFIXES):
            if other := files.get(file.stem):
                raise ConfigError(f"{other} and {file.name} are both there: keep one of them")
            files[file.stem] = file
        if "train" in files:
            return {split: files[split] for split in ("train", "test") if split in files}
        if len(files) < 2 or "test" in files:
            raise SetupError(
                f"{path} is neither a table nor a folder with train.csv or train.parquet, or with "
                f"one file for each site: {_CURE}"
            )
        return files


def read_table(path: Path, dialect: Dialect, key: str = "task.path") -> DataFrame:
    """Return a table: from CSV its texts, from Parquet its own types.

    Errors name a row by its place in the file, from 1, and ``key``, which names the file.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path} must end in {' or '.join(SUFFIXES)}")
    require_file(path, key)
    stat = path.stat()
    return _read(path, dialect, key, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=2)  # to infer the columns and to read the rows; not to be edited
def _read(path: Path, dialect: Dialect, key: str, stamp: tuple[int, ...]) -> DataFrame:
    import pandas

    try:
        if path.suffix.lower() == ".csv":
            table = read_csv(path, key, dialect)
        else:
            table = pandas.read_parquet(path, dtype_backend="numpy_nullable")
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # includes Arrow's own
        said = " ".join(str(error).split())  # in one line
        raise DamagedFileError(f"{path} cannot be read as a table: {said}") from None
    index = [name for name in table.index.names if name not in (None, *table.columns)]
    table = table.reset_index(index).reset_index(drop=True)  # pandas stores a column as its index
    decimal = dialect.decimal if path.suffix.lower() == ".csv" else "."
    table.attrs |= {"path": str(path), "decimal": decimal}
    return table


def where(table: DataFrame) -> str:
    """Return the file of a table, for errors."""
    return str(table.attrs.get("path", "the table"))


def row_in_file(table: DataFrame, position: int) -> tuple[str, int]:
    """Return the file of a table's row, and its number there, from 1."""
    row = int(table.index[position])
    firsts: dict[int, str] = table.attrs.get("firsts", {0: where(table)})
    first = max(one for one in firsts if one <= row)
    return firsts[first], row - first + 1


def require_columns(table: DataFrame, names: Sequence[str], key: str) -> None:
    """Reject a table that lacks a column which ``key`` names."""
    for name in names:
        if name not in table.columns:
            raise ConfigError(
                f"{where(table)} has no column {name} ({key}); it has: "
                f"{', '.join(map(str, table.columns))}"
            )


def _joined(files: dict[str, Path], dialect: Dialect, column: str) -> DataFrame:
    """Return the rows of all sites' files, each with its file's name in ``column``."""
    import pandas

    tables = {name: read_table(path, dialect) for name, path in files.items()}
    names = list(dict.fromkeys(name for one in tables.values() for name in one.columns))
    for site, table in tables.items():
        if lacking := [name for name in names if name not in table.columns and name != column]:
            text = "%s has no column %s, which other sites have: its values are missing"
            getLogger("flwr").log(WARNING, text, files[site], ", ".join(lacking))
    parts = [
        table if column in table.columns else table.assign(**{column: site})
        for site, table in tables.items()
    ]
    whole = pandas.concat(parts, ignore_index=True)
    folder = next(iter(files.values())).parent
    firsts = accumulate((len(part) for part in parts[:-1]), initial=0)  # each file's first row
    whole.attrs = {
        "path": str(folder),
        "decimal": tables[next(iter(tables))].attrs["decimal"],
        "firsts": dict(zip(firsts, map(str, files.values()), strict=True)),
    }
    return whole
