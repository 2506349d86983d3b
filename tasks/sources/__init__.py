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
        train, test = self._decoders()
        examples = decode_once(f"{self.task.name}-train", train)
        if test is not None:
            return examples, decode_once(f"{self.task.name}-test", test)
        strata = examples.labels if examples.groups is None else examples.groups
        kept, split_off = stratified_split(strata, self.task.test_fraction, SPLIT_SEED)
        return examples.select(kept), examples.select(split_off)

    def _decoders(self) -> tuple[Decoder, Decoder | None]:
        task = self.task
        if task.source == "embedded":
            return DigitsDecoder(_shape(task)), None
        if task.source == "image_folder":
            return self._folder_decoders()
        if (folder := self._files_folder()) is not None:
            test = None if task.test_split is None else self._parquet(folder, task.test_split)
            return self._parquet(folder, task.train_split), test
        test_hub = None if task.test_split is None else self._hub(task.test_split)
        return self._hub(task.train_split), test_hub

    # ---- parquet files and the hub ---------------------------------------------------------------

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

    def _folder_decoders(self) -> tuple[Decoder, Decoder | None]:
        folder, names, shape = self._image_folder(), self.class_names(), _shape(self.task)
        train = FolderDecoder(_train_folder(folder), names, shape)
        test = folder / "test"
        return train, FolderDecoder(test, names, shape) if test.is_dir() else None


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
