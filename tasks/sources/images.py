"""Images: with the code, in tables, in folders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from common.errors import ConfigError
from tasks.config import ImageConfig
from tasks.sources.arrays import Decoder
from tasks.sources.embedded import DigitsDecoder
from tasks.sources.encodings import ImageEncoding
from tasks.sources.folders import FolderDecoder, class_folders
from tasks.sources.source import Source, existing
from tasks.sources.tables import Columns


@dataclass(frozen=True)
class ImageSource(Source):
    """The examples of a task on images.

    A site's folder may also hold train/ and test/ with one subfolder a class, which carry the
    task's class names.
    """

    site_layouts: ClassVar[str] = "train.parquet nor a folder train/"

    task: ImageConfig

    @property
    def encoding(self) -> ImageEncoding:
        """Pixels of the task's size."""
        return ImageEncoding(self.task.input_shape)

    @property
    def columns(self) -> Columns:
        """The tables' columns."""
        return Columns(self.task.image_column, self.task.label_column, self.task.group_column)

    def class_names(self) -> tuple[str, ...]:
        """Return the classes in the order of their labels; may have to look at the data folder."""
        if self.task.class_names is None and self.task.source == "image_folder":
            return class_folders(_train_folder(self._image_folder()))
        return super().class_names()

    def _train_decoder(self) -> Decoder:
        if self.task.source == "embedded":
            return DigitsDecoder(self.encoding)
        if self.task.source == "image_folder":
            return self._folder(_train_folder(self._image_folder()))
        return super()._train_decoder()

    def _test_decoder(self) -> Decoder | None:
        if self.task.source == "image_folder":
            folder = self._image_folder() / "test"
            return self._folder(folder) if folder.is_dir() else None
        if self.task.source == "embedded":
            return None
        return super()._test_decoder()

    def _site_decoder(self, folder: Path, split: str) -> Decoder | None:
        decoder = super()._site_decoder(folder, split)
        if decoder is None and (folder / split).is_dir():
            return self._folder(folder / split)
        return decoder

    def _image_folder(self) -> Path:
        if self.task.path is not None:
            return existing(Path(self.task.path).expanduser(), "task.path")
        root = os.environ.get("FEDHET_DATA")
        if root is None:
            raise ConfigError(
                "task.path is not set: it names the folder with train/ and, optionally, test/"
            )
        return existing(Path(root) / self.task.name, "task.path or FEDHET_DATA")

    def _folder(self, folder: Path) -> FolderDecoder:
        return FolderDecoder(folder, self.class_names(), self.encoding)


def _train_folder(folder: Path) -> Path:
    if not (folder / "train").is_dir():
        raise ConfigError(
            f"{folder} has no subfolder train/ with one subfolder a class (nor test/, which is "
            "enough to evaluate)"
        )
    return folder / "train"
