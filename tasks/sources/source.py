"""The training and test examples of a task."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from numpy.typing import NDArray

from fedhet.common.errors import ConfigError, SetupError
from fedhet.tasks.config import ImageConfig, TextConfig
from fedhet.tasks.sources.arrays import SPLIT_SEED, Indices, Split, stratified_split
from fedhet.tasks.sources.encodings import Encoding
from fedhet.tasks.sources.folders import require_folder
from fedhet.tasks.sources.store import Decoder, content_sha256, decode_once, decoded_folder
from fedhet.tasks.sources.tables import (
    HubTable,
    ParquetTable,
    SourceColumns,
    Table,
    TableDecoder,
    parquet_files,
)
from fedhet.tasks.vocabulary import Vocabulary

# The data sets of conf/task/*.yaml, whose copies are in a folder with the task's name.
HUB = {
    "cifar10": "uoft-cs/cifar10",
    "cifar100": "uoft-cs/cifar100",
    "femnist": "flwrlabs/femnist",
    "imdb": "stanfordnlp/imdb",
    "mnist": "ylecun/mnist",
    "tiny_imagenet": "zh-plus/tiny-imagenet",
}


@dataclass(frozen=True)
class Source(ABC):
    """Examples in parquet files or on the hub; subclasses decode them."""

    site_layouts: ClassVar[str] = "train.parquet nor train-*.parquet"

    task: ImageConfig | TextConfig

    @property
    @abstractmethod
    def encoding(self) -> Encoding:
        """The encoding of examples as arrays."""

    @property
    @abstractmethod
    def columns(self) -> SourceColumns:
        """The tables' columns."""

    def class_names(self) -> tuple[str, ...]:
        """Return the classes in the order of their labels; may read the data folder."""
        if self.task.class_names is None:
            raise ConfigError(
                f"task.num_classes is not set: task.source={self.task.source} needs it"
            )
        return self.task.class_names

    def vocabulary(self) -> Vocabulary | None:
        """Return the words of the tokens; None if the inputs are images."""
        return None

    def load(self) -> tuple[Split, Split]:
        """Return the training and the test split, decoded."""
        train, test = self._train_decoder(), self._test_decoder()
        examples = decode_once(self._name("train"), train)
        if test is not None:
            return examples, decode_once(self._name("test"), test)
        strata = examples.labels if examples.clients is None else examples.clients
        kept, split_off = self._split_off(strata)
        return examples.select(kept), examples.select(split_off)

    def load_test(self) -> Split | None:
        """Return the test split without looking for training examples, which a server may lack.

        Return None if the test split is part of the training examples.
        """
        decoder = self._test_decoder()
        return None if decoder is None else decode_once(self._name("test"), decoder)

    def used(self, splits: Sequence[str]) -> dict[str, dict[str, object]]:
        """Return where splits come from (train, test), and the hash of their decoded examples."""
        found: dict[str, dict[str, object]] = {}
        for split in splits:
            own = self._test_decoder() if split == "test" else None
            decoder = own or self._train_decoder()
            folder = decoded_folder(self._name("test" if own else "train"), decoder)
            found[split] = {**decoder.origin, "sha256": content_sha256(folder)}
        return found

    def num_clients(self, min_size: int) -> int | None:
        """Return how many clients have that many examples, if that is known without decoding."""
        return None

    def load_site(self, folder: Path) -> tuple[Split, Split | None]:
        """Return the training split in a site's own folder, and the test split if there is one.

        The folder holds train.parquet and test.parquet in the task's schema. Labels mean the same
        at all sites; classes may be missing.
        """
        require_folder(folder, "the node config's data-folder")
        splits: list[Split] = []
        for split in ("train", "test"):
            decoder = self._site_decoder(folder, split)
            if decoder is not None:
                splits.append(decode_once(f"{self.task.name}-site-{split}", decoder))
            elif split == "train":
                raise SetupError(f"{folder} has neither {self.site_layouts}")
        return splits[0], splits[1] if len(splits) == 2 else None

    def _name(self, split: str) -> str:
        return f"{self.task.name}-{split}"

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
        columns = SourceColumns(
            self.columns.example, self.columns.label, None, self.columns.example_key
        )
        table = ParquetTable(tuple(files), columns, len(self.class_names()))
        return TableDecoder(table, self.encoding)

    def _split_off(self, strata: NDArray[Any]) -> tuple[Indices, Indices]:
        return stratified_split(strata, self.task.test_fraction, SPLIT_SEED)

    def _table(self, split: str) -> Table:
        classes, folder = len(self.class_names()), self._files_folder()
        if folder is not None:
            if files := parquet_files(folder, split):
                return ParquetTable(tuple(files), self.columns, classes)
            raise SetupError(
                f"{folder} has no {split}.parquet; the splits are named by task.train_split and "
                "task.test_split (null: split off task.test_fraction)"
            )
        if self.task.hub is None:
            raise ConfigError("task.source=hub needs task.hub, the name of the data set there")
        return HubTable(self.task.hub, split, self.columns, classes, self.task.name)

    def _files_folder(self) -> Path | None:
        """Return the folder with the parquet files; None: load from the hub."""
        task = self.task
        root = task.path or os.environ.get("FEDHET_DATA")
        names = self._folder_names()
        folders = [Path(root).expanduser() / name for name in names] if root is not None else []
        for folder in folders:
            if folder.is_dir():
                return folder
        if task.path is not None or task.source == "files":
            places = " nor ".join(map(str, folders)) or names[0]
            raise SetupError(
                f"{places} is not a folder: task.path, or the environment variable FEDHET_DATA, "
                f"must name a folder that has {names[0]}/train.parquet"
                + (f", a copy of task.hub={task.hub}" if names[0] == task.hub else "")
            )
        return None

    def _folder_names(self) -> list[str]:
        """Return the folders, below a folder of data sets, that may have this data set.

        A folder with a task's name has the task's own data set. Another data set on the hub has a
        folder with its full name.
        """
        task = self.task
        own = HUB.get(task.name)
        if task.hub is None or own == task.hub:
            return [task.name]
        if own is None and (task.path is not None or task.source == "files"):
            return [task.hub, task.name]  # the user's own task, and the folder that it names
        return [task.hub]
