"""The training and the test examples of a task, wherever they are."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from common.errors import ConfigError
from tasks.config import TaskConfig
from tasks.sources.arrays import Decoder, Encoding, Indices, Split, stratified_split
from tasks.sources.store import decode_once
from tasks.sources.tables import (
    Columns,
    HubTable,
    ParquetTable,
    Table,
    TableDecoder,
    parquet_files,
)
from tasks.sources.vocabulary import Vocabulary

SPLIT_SEED = 0  # of a test set that we split off: the same whatever the run's seed


@dataclass(frozen=True)
class Source(ABC):
    """Examples in tables: parquet files or the hub. A kind of inputs adds how they are decoded."""

    site_layouts: ClassVar[str] = "train.parquet nor train-*.parquet"

    task: TaskConfig

    @property
    @abstractmethod
    def encoding(self) -> Encoding:
        """How an example becomes an array."""

    @property
    @abstractmethod
    def columns(self) -> Columns:
        """The tables' columns."""

    def class_names(self) -> tuple[str, ...]:
        """Return the classes in the order of their labels; may have to look at the data folder."""
        if self.task.class_names is None:
            raise ConfigError(
                f"task.num_classes is not set: task.source={self.task.source} needs it"
            )
        return self.task.class_names

    def vocabulary(self) -> Vocabulary | None:
        """Return the words that tokens stand for; None where the inputs are no texts."""
        return None

    def load(self) -> tuple[Split, Split]:
        """Return the training and the test split, decoded."""
        train, test = self._train_decoder(), self._test_decoder()  # what is missing is said at once
        examples = decode_once(f"{self.task.name}-train", train)
        if test is not None:
            return examples, decode_once(f"{self.task.name}-test", test)
        kept, split_off = self._split_off(
            examples.labels if examples.groups is None else examples.groups
        )
        return examples.select(kept), examples.select(split_off)

    def load_test(self) -> Split | None:
        """Return the test split where it stands by itself; None: it is part of the training one.

        Does not look for training examples: the server of a federation of sites has none.
        """
        decoder = self._test_decoder()
        return None if decoder is None else decode_once(f"{self.task.name}-test", decoder)

    def load_site(self, folder: Path) -> tuple[Split, Split | None]:
        """Return the examples in a site's own folder: train, and test where it has one.

        The folder holds train.parquet and test.parquet in the task's schema. Labels mean the same
        at all sites; not every class must be there.
        """
        existing(folder, "the node config's data-folder")
        splits: list[Split] = []
        for split in ("train", "test"):
            decoder = self._site_decoder(folder, split)
            if decoder is not None:
                splits.append(decode_once(f"{self.task.name}-site-{split}", decoder))
            elif split == "train":
                raise ConfigError(f"{folder} has neither {self.site_layouts}")
        return splits[0], splits[1] if len(splits) == 2 else None

    def _train_decoder(self) -> Decoder:
        return TableDecoder(self._table(self.task.train_split), self.encoding)

    def _test_decoder(self) -> Decoder | None:
        if self.task.test_split is None:
            return None
        return TableDecoder(self._table(self.task.test_split), self.encoding)

    def _site_decoder(self, folder: Path, split: str) -> Decoder | None:
        files = parquet_files(folder, split)
        if not files:
            return None
        columns = Columns(self.columns.example, self.columns.label, None, self.columns.example_key)
        table = ParquetTable(tuple(files), columns, len(self.class_names()))
        return TableDecoder(table, self.encoding)

    def _split_off(self, strata: NDArray[Any]) -> tuple[Indices, Indices]:
        return stratified_split(strata, self.task.test_fraction, SPLIT_SEED)

    # ---- parquet files and the hub ---------------------------------------------------------------

    def _table(self, split: str) -> Table:
        folder = self._files_folder()
        return self._hub(split) if folder is None else self._parquet(folder, split)

    def _files_folder(self) -> Path | None:
        """Return where the parquet files are; None: load from the hub."""
        root = self.task.path or os.environ.get("FEDHET_DATA")
        folder = None if root is None else Path(root).expanduser() / self.task.name
        if folder is not None and folder.is_dir():
            return folder
        if self.task.path is not None or self.task.source == "files":
            raise ConfigError(
                f"{folder or self.task.name} is not a folder: task.path, or the environment "
                f"variable FEDHET_DATA, must name a folder that has {self.task.name}/train.parquet"
            )
        return None

    def _parquet(self, folder: Path, split: str) -> ParquetTable:
        files = parquet_files(folder, split)
        if not files:
            raise ConfigError(
                f"{folder} has no {split}.parquet; the splits are named by task.train_split and "
                "task.test_split (null: split off task.test_fraction)"
            )
        return ParquetTable(tuple(files), self.columns, len(self.class_names()))

    def _hub(self, split: str) -> HubTable:
        if self.task.hub is None:
            raise ConfigError("task.source=hub needs task.hub, the name of the data set there")
        return HubTable(
            repository=self.task.hub,
            split=split,
            columns=self.columns,
            num_classes=len(self.class_names()),
            folder_name=self.task.name,
        )


def existing(folder: Path, key: str) -> Path:
    """Return the folder.

    Raises:
        ConfigError: where it is none; names the key that says which.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: change {key}")
    return folder
