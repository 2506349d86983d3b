"""Where the examples come from: with the code, on the hub, in files, at a site."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tasks.config import TaskConfig
from tasks.errors import ConfigError
from tasks.sources.arrays import Decoder, Split, stratified_split
from tasks.sources.embedded import DigitsDecoder
from tasks.sources.folders import FolderDecoder, class_folders
from tasks.sources.store import decode_once
from tasks.sources.tables import Columns, HubDecoder, ParquetDecoder, parquet_files

SPLIT_SEED = 0  # of a test set that we split off: the same whatever the run's seed

__all__ = ["Source", "Split", "load_site"]


@dataclass(frozen=True)
class Source:
    """The training and the test examples of a task."""

    task: TaskConfig

    def class_names(self) -> tuple[str, ...]:
        """Return the classes in the order of their labels; may have to look at the data folder."""
        if self.task.class_names is not None:
            return self.task.class_names
        if self.task.source != "image_folder":
            raise ConfigError(
                f"task.num_classes is not set: task.source={self.task.source} needs it"
            )
        return class_folders(_train_folder(self._image_folder()))

    def load(self) -> tuple[Split, Split]:
        """Return the training and the test split, decoded."""
        train, test = self._train_decoder(), self._test_decoder()  # what is missing is said at once
        examples = decode_once(f"{self.task.name}-train", train)
        if test is not None:
            return examples, decode_once(f"{self.task.name}-test", test)
        strata = examples.labels if examples.groups is None else examples.groups
        kept, split_off = stratified_split(strata, self.task.test_fraction, SPLIT_SEED)
        return examples.select(kept), examples.select(split_off)

    def load_test(self) -> Split | None:
        """Return the test split where it stands by itself; None: it is part of the training one.

        Does not look for training examples: the server of a federation of sites has none.
        """
        decoder = self._test_decoder()
        return None if decoder is None else decode_once(f"{self.task.name}-test", decoder)

    def _train_decoder(self) -> Decoder:
        if self.task.source == "embedded":
            return DigitsDecoder(_shape(self.task))
        if self.task.source == "image_folder":
            return self._folder(_train_folder(self._image_folder()))
        return self._table(self.task.train_split)

    def _test_decoder(self) -> Decoder | None:
        if self.task.source == "image_folder":
            folder = self._image_folder() / "test"
            return self._folder(folder) if folder.is_dir() else None
        if self.task.source == "embedded" or self.task.test_split is None:
            return None
        return self._table(self.task.test_split)

    # ---- parquet files and the hub ---------------------------------------------------------------

    def _table(self, split: str) -> Decoder:
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

    def _parquet(self, folder: Path, split: str) -> ParquetDecoder:
        files = parquet_files(folder, split)
        if not files:
            raise ConfigError(
                f"{folder} has no {split}.parquet; the splits are named by task.train_split and "
                "task.test_split (null: split off task.test_fraction)"
            )
        return ParquetDecoder(
            tuple(files), _columns(self.task), _shape(self.task), len(self.class_names())
        )

    def _hub(self, split: str) -> HubDecoder:
        if self.task.hub is None:
            raise ConfigError("task.source=hub needs task.hub, the name of the data set there")
        return HubDecoder(
            repository=self.task.hub,
            split=split,
            columns=_columns(self.task),
            shape=_shape(self.task),
            num_classes=len(self.class_names()),
            folder_name=self.task.name,
        )

    # ---- image folders ---------------------------------------------------------------------------

    def _image_folder(self) -> Path:
        if self.task.path is not None:
            return _existing(Path(self.task.path).expanduser(), "task.path")
        root = os.environ.get("FEDHET_DATA")
        if root is None:
            raise ConfigError(
                "task.path is not set: it names the folder with train/ and, optionally, test/"
            )
        return _existing(Path(root) / self.task.name, "task.path or FEDHET_DATA")

    def _folder(self, folder: Path) -> FolderDecoder:
        return FolderDecoder(folder, self.class_names(), _shape(self.task))


def load_site(
    task: TaskConfig, classes: tuple[str, ...], folder: Path
) -> tuple[Split, Split | None]:
    """Return the examples in a site's own folder: train, and test where it has one.

    The folder holds train.parquet and test.parquet in the task's schema, or train/ and test/ with
    one subfolder a class. Labels mean the same at all sites, so an image folder's subfolders carry
    the task's class names; not every class must be there.
    """
    _existing(folder, "the node config's data-folder")
    splits: list[Split] = []
    for split in ("train", "test"):
        decoder: Decoder
        if files := parquet_files(folder, split):
            columns = Columns(task.image_column, task.label_column)
            decoder = ParquetDecoder(tuple(files), columns, _shape(task), len(classes))
        elif (folder / split).is_dir():
            decoder = FolderDecoder(folder / split, classes, _shape(task))
        elif split == "test":
            return splits[0], None
        else:
            raise ConfigError(f"{folder} has neither train.parquet nor a folder train/")
        splits.append(decode_once(f"{task.name}-site-{split}", decoder))
    return splits[0], splits[1]


def _existing(folder: Path, key: str) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: change {key}")
    return folder


def _train_folder(folder: Path) -> Path:
    if not (folder / "train").is_dir():
        raise ConfigError(f"{folder} has no subfolder train/ with one subfolder a class")
    return folder / "train"


def _columns(task: TaskConfig) -> Columns:
    return Columns(task.image_column, task.label_column, task.group_column)


def _shape(task: TaskConfig) -> tuple[int, int, int]:
    return task.channels, task.image_size, task.image_size
