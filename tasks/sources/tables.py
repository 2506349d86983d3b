"""Examples in tables of the Hugging Face hub's schema: parquet files, or the hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.common.errors import ConfigError, DamagedFileError
from fedhet.common.text_files import require_file
from fedhet.tasks.sources.arrays import Record
from fedhet.tasks.sources.encodings import Encoding

CHUNK = 512  # rows per read


@dataclass(frozen=True)
class SourceColumns:
    """The columns of a table.

    Attributes:
        example: images, as structs of bytes and path, or texts.
        label: numbers from 0.
        client: whose an example is, if that is known.
        example_key: the task's key that names the column of examples.
    """

    example: str
    label: str
    client: str | None = None
    example_key: str = "image_column"

    @property
    def names(self) -> list[str]:
        """The columns to read."""
        return [name for name in (self.example, self.label, self.client) if name is not None]

    def check(self, where: object, available: list[str]) -> None:
        """Reject a table without these columns."""
        keys = (self.example_key, "label_column", "client_column")
        for key, name in zip(keys, (self.example, self.label, self.client), strict=True):
            if name is not None and name not in available:
                raise ConfigError(
                    f"{where} has no column {name!r} (task.{key}); it has: {', '.join(available)}"
                )


def parquet_files(folder: Path, split: str) -> list[Path]:
    """Return <split>.parquet, or the hub's <split>-00000-of-00002.parquet and so on."""
    single = folder / f"{split}.parquet"
    if single.is_file():
        return [single]
    several = sorted(folder.glob(f"{split}-*.parquet"))
    for path in several:
        require_file(path, "task.path")
    return several


@dataclass(frozen=True)
class ParquetTable:
    """One split as parquet files."""

    files: tuple[Path, ...]
    columns: SourceColumns
    num_classes: int

    @property
    def identity(self) -> dict[str, object]:
        """The current files, and how they are read."""
        stats = [(str(path.resolve()), path.stat()) for path in self.files]
        files = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        return {"files": files, "columns": self.columns.names, "classes": self.num_classes}

    @property
    def origin(self) -> dict[str, object]:
        """The files."""
        return {"files": [str(path.resolve()) for path in self.files]}

    def count(self) -> int:
        """Return the number of rows."""
        return sum(int(_open(path).metadata.num_rows) for path in self.files)

    def rows(self) -> Iterator[Record]:
        """Yield the rows in the files' order."""
        for path in self.files:
            table = _open(path)
            self.columns.check(path, list(table.schema_arrow.names))
            try:
                for chunk in table.iter_batches(CHUNK, columns=self.columns.names):
                    yield from _rows(chunk, self.columns, self.num_classes, path)
            except (OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
                if isinstance(error, ConfigError):
                    raise
                raise DamagedFileError(f"{path} cannot be read as parquet: {error}") from None


def _open(path: Path) -> Any:
    """Open a parquet file; its pages are compared with their checksums, if there are any."""
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path, page_checksum_verification=True)
    except (OSError, ValueError) as error:  # includes Arrow's own errors
        raise DamagedFileError(f"{path} cannot be read as parquet: {error}") from None


@dataclass(frozen=True)
class HubTable:
    """One split of a data set on the hub."""

    repository: str
    split: str
    columns: SourceColumns
    num_classes: int
    folder_name: str

    @property
    def identity(self) -> dict[str, object]:
        """The repository, and how it is read."""
        schema = {"columns": self.columns.names, "classes": self.num_classes}
        return {"hub": self.repository, "split": self.split, **schema}

    @property
    def origin(self) -> dict[str, object]:
        """The repository and its revision; null: the newest when it was loaded."""
        name, _, revision = self.repository.partition("@")
        return {"hub": name, "revision": revision or None, "split": self.split}

    def count(self) -> int:
        """Return the number of rows; downloads the data set if necessary."""
        return len(self._load())

    def rows(self) -> Iterator[Record]:
        """Yield the rows in the hub's order."""
        table = self._load()
        self.columns.check(self.repository, list(table.column_names))
        chunks = table.select_columns(self.columns.names).with_format("arrow").iter(CHUNK)
        for chunk in chunks:
            yield from _rows(chunk, self.columns, self.num_classes, self.repository)

    def _load(self) -> Any:
        import datasets

        name, _, revision = self.repository.partition("@")
        pinned = {"revision": revision} if revision else {}
        try:
            return datasets.load_dataset(name, split=self.split, **pinned)
        except Exception as error:  # offline, firewall, renamed: each library raises its own error
            raise ConfigError(
                f"{self.repository} could not be loaded from the hub "
                f"({type(error).__name__}: {error}). Without a connection, put its parquet files "
                f"at ROOT/{self.folder_name}/{self.split}.parquet and name ROOT by task.path or "
                "the environment variable FEDHET_DATA"
            ) from error


Table = ParquetTable | HubTable


@dataclass(frozen=True)
class TableDecoder:
    """One split as a table, and the encoding of its examples."""

    table: Table
    encoding: Encoding

    @property
    def identity(self) -> dict[str, object]:
        """The table, and how it is decoded."""
        return {**self.table.identity, **self.encoding.identity}

    @property
    def origin(self) -> dict[str, object]:
        """Where the table is."""
        return self.table.origin

    def count(self) -> int:
        """Return the number of rows."""
        return self.table.count()

    def records(self) -> Iterator[Record]:
        """Yield the examples in the table's order."""
        for number, row in enumerate(self.table.rows()):
            try:
                value = self.encoding.encode(row.value)
            except ConfigError as error:
                raise type(error)(f"{self.table.origin}, example {number}: {error}") from None
            except Exception as error:  # each of Pillow's decoders raises its own
                raise DamagedFileError(
                    f"{self.table.origin} cannot be read: example {number} is damaged, or not what "
                    f"task.inputs says ({type(error).__name__}: {error})"
                ) from None
            yield Record(value, row.label, row.client)


def _rows(chunk: Any, columns: SourceColumns, num_classes: int, where: object) -> Iterator[Record]:
    values = chunk.column(columns.example).to_pylist()
    labels = chunk.column(columns.label).to_pylist()
    clients = chunk.column(columns.client).to_pylist() if columns.client else [None] * len(labels)
    for value, label, client in zip(values, labels, clients, strict=True):
        if label is None or not 0 <= label < num_classes or label % 1:
            raise ConfigError(
                f"{where} has the label {label}, but task.num_classes={num_classes} allows "
                f"0..{num_classes - 1}, whole numbers: change task.num_classes or task.label_column"
            )
        if columns.client and client is None:
            raise ConfigError(
                f"{where}: an example has no {columns.client} (task.client_column): whose is it?"
            )
        yield Record(value, int(label), None if client is None else str(client))
