"""Images in tables of the hub's schema: parquet files, or the hub itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import ConfigError
from tasks.sources.arrays import Record

CHUNK = 512  # rows that are read at once


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; images are structs of bytes and path."""

    image: str
    label: str
    group: str | None = None

    @property
    def names(self) -> list[str]:
        """All that are read."""
        return [name for name in (self.image, self.label, self.group) if name is not None]

    def check(self, where: object, available: list[str]) -> None:
        """Refuse a table without these columns."""
        for key, name in (("image", self.image), ("label", self.label), ("group", self.group)):
            if name is not None and name not in available:
                raise ConfigError(
                    f"{where} has no column {name!r} (task.{key}_column); it has: "
                    f"{', '.join(available)}"
                )


def parquet_files(folder: Path, split: str) -> list[Path]:
    """Return <split>.parquet, or the hub's <split>-00000-of-00002.parquet and so on."""
    single = folder / f"{split}.parquet"
    return [single] if single.is_file() else sorted(folder.glob(f"{split}-*.parquet"))


@dataclass(frozen=True)
class ParquetDecoder:
    """One split as parquet files."""

    files: tuple[Path, ...]
    columns: Columns
    shape: tuple[int, int, int]
    num_classes: int

    @property
    def identity(self) -> dict[str, object]:
        """The files as they are now, and how they are read."""
        stats = [(str(path.resolve()), path.stat()) for path in self.files]
        files = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        return {"files": files, **_reading(self.columns, self.shape, self.num_classes)}

    def count(self) -> int:
        """Return the number of rows."""
        from pyarrow.parquet import ParquetFile

        return sum(int(ParquetFile(path).metadata.num_rows) for path in self.files)

    def records(self) -> Iterator[Record]:
        """Yield the examples in the files' order."""
        from pyarrow.parquet import ParquetFile

        for path in self.files:
            table = ParquetFile(path)
            self.columns.check(path, list(table.schema_arrow.names))
            for chunk in table.iter_batches(CHUNK, columns=self.columns.names):
                yield from _records(chunk, self.columns, self.shape, self.num_classes, path)


@dataclass(frozen=True)
class HubDecoder:
    """One split of a data set on the hub."""

    repository: str
    split: str
    columns: Columns
    shape: tuple[int, int, int]
    num_classes: int
    folder_name: str

    @property
    def identity(self) -> dict[str, object]:
        """The repository, and how it is read."""
        reading = _reading(self.columns, self.shape, self.num_classes)
        return {"hub": self.repository, "split": self.split, **reading}

    def count(self) -> int:
        """Return the number of rows; downloads the data set where that has not been done."""
        return len(self._load())

    def records(self) -> Iterator[Record]:
        """Yield the examples in the hub's order."""
        table = self._load()
        self.columns.check(self.repository, list(table.column_names))
        chunks = table.select_columns(self.columns.names).with_format("arrow").iter(CHUNK)
        for chunk in chunks:
            yield from _records(chunk, self.columns, self.shape, self.num_classes, self.repository)

    def _load(self) -> Any:
        import datasets

        try:
            return datasets.load_dataset(self.repository, split=self.split)
        except Exception as error:  # offline, a firewall, a renamed set: each library its own error
            raise ConfigError(
                f"{self.repository} could not be loaded from the hub "
                f"({type(error).__name__}: {error}). Without a connection, put its parquet files "
                f"at ROOT/{self.folder_name}/{self.split}.parquet and name ROOT by task.path or "
                "the environment variable FEDHET_DATA"
            ) from error


def _reading(columns: Columns, shape: tuple[int, int, int], num_classes: int) -> dict[str, object]:
    return {"columns": columns.names, "shape": list(shape), "classes": num_classes}


def _records(
    chunk: Any, columns: Columns, shape: tuple[int, int, int], num_classes: int, where: object
) -> Iterator[Record]:
    from tasks.sources.pixels import decode_image

    images = chunk.column(columns.image).to_pylist()
    labels = chunk.column(columns.label).to_pylist()
    groups = chunk.column(columns.group).to_pylist() if columns.group else [None] * len(labels)
    for image, label, group in zip(images, labels, groups, strict=True):
        if label is None or not 0 <= label < num_classes:
            raise ConfigError(
                f"{where} has the label {label} and task.num_classes={num_classes} allows "
                f"0..{num_classes - 1}: change task.num_classes or task.label_column"
            )
        encoded = image["bytes"] if image["bytes"] is not None else Path(image["path"])
        yield Record(
            decode_image(encoded, shape), int(label), None if group is None else str(group)
        )
