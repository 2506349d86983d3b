"""Images from scikit-learn, from tables or from folders with one subfolder per class."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING, getLogger
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedhet.common.errors import ConfigError, SetupError
from fedhet.common.files import folders_below, subfolders
from fedhet.tasks.config import ImageConfig
from fedhet.tasks.sources.arrays import Record, Split
from fedhet.tasks.sources.encodings import ImageEncoding
from fedhet.tasks.sources.folders import files_in, require_folder
from fedhet.tasks.sources.source import Source
from fedhet.tasks.sources.store import Decoder
from fedhet.tasks.sources.tables import Columns

SUFFIXES = (".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def images_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of a folder by name: images, by their endings, and others."""
    files = files_in(folder)
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    return images, [path for path in files if path.suffix.lower() not in SUFFIXES]


def warn_of_others(folder: Path, others: Sequence[Path]) -> None:
    """Log how many files of a folder are not images, by their endings."""
    if others:
        text = "%s: %s files are left out, because their endings are not images', such as %s"
        getLogger("flwr").log(WARNING, text, folder, len(others), others[0].name)


@dataclass(frozen=True)
class ImageSource(Source):
    """The examples of a task on images.

    A site's folder may also hold train/ and test/ with one subfolder per class, named like the
    task's classes.
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
        return Columns(self.task.image_column, self.task.label_column, self.task.client_column)

    def class_names(self) -> tuple[str, ...]:
        """Return the classes in the order of their labels; may read the data folder."""
        if self.task.class_names is None and self.task.source == "image_folder":
            return _training_classes(self._train_folder())
        return super().class_names()

    def load(self) -> tuple[Split, Split]:
        """Return the training and the test split, decoded; log the classes without an image."""
        train, test = super().load()
        if self.task.source == "image_folder":
            held = set(train.labels.tolist())
            names = [name for n, name in enumerate(self.class_names()) if n not in held]
            if names:
                text = "%s: no training image of %s"
                getLogger("flwr").log(WARNING, text, self._train_folder(), ", ".join(names))
        return train, test

    def _train_decoder(self) -> Decoder:
        if self.task.source == "embedded":
            return DigitsDecoder(self.encoding)
        if self.task.source == "image_folder":
            return self._folder(self._train_folder())
        return super()._train_decoder()

    def _test_decoder(self) -> Decoder | None:
        if self.task.source == "image_folder":
            folder = self._image_folder() / "test"
            return self._folder(folder) if folder.is_dir() else None
        return None if self.task.source == "embedded" else super()._test_decoder()

    def _site_decoder(self, folder: Path, split: str) -> Decoder | None:
        decoder = super()._site_decoder(folder, split)
        if decoder is None and (folder / split).is_dir():
            return self._folder(folder / split)
        return decoder

    def _image_folder(self) -> Path:
        if self.task.path is not None:
            return require_folder(Path(self.task.path).expanduser(), "task.path")
        root = os.environ.get("FEDHET_DATA")
        if root is None:
            raise SetupError(
                "task.path is not set: it names the folder with train/ and, optionally, test/"
            )
        return require_folder(Path(root) / self.task.name, "task.path or FEDHET_DATA")

    def _train_folder(self) -> Path:
        folder = self._image_folder() / "train"
        if not folder.is_dir():
            raise SetupError(
                f"{folder.parent} has no subfolder train/ with one subfolder per class (nor test/, "
                "which is enough to evaluate)"
            )
        return folder

    def _folder(self, folder: Path) -> FolderDecoder:
        return FolderDecoder(folder, self.class_names(), self.encoding)


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the subfolders, the classes, in alphabetical order."""
    names = [path.name for path in subfolders(folder, set())]
    if not names:
        raise ConfigError(f"{folder} has no subfolder: make one with images for each class")
    return tuple(names)


def _training_classes(folder: Path) -> tuple[str, ...]:
    """Return the classes that a folder's subfolders name; there must be at least two."""
    names = class_folders(folder)
    if len(names) < 2:
        raise ConfigError(
            f"{folder} has one subfolder, {names[0]}, but needs one for each of at least two "
            "classes: perhaps the images are one folder too deep"
        )
    return names


@dataclass(frozen=True)
class DigitsDecoder:
    """scikit-learn's handwritten digits: 1,797 images of 8x8 pixels that need no download."""

    encoding: ImageEncoding

    @property
    def identity(self) -> dict[str, object]:
        """The version of scikit-learn, which holds the images."""
        version = importlib.metadata.version("scikit-learn")
        return {"scikit-learn": version, **self.encoding.identity}

    @property
    def origin(self) -> dict[str, object]:
        """The package that holds the images."""
        return {"package": f"scikit-learn {importlib.metadata.version('scikit-learn')}"}

    def count(self) -> int:
        """Return the number of examples."""
        return 1797

    def records(self) -> Iterator[Record]:
        """Yield the examples; their 17 shades of grey become 0..255."""
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        shades = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        for pixels, label in zip(shades, digits.target, strict=True):
            yield Record(self.encoding.fit(Image.fromarray(pixels)), int(label))


@dataclass(frozen=True)
class FolderDecoder:
    """One split as an image folder.

    Attributes:
        folder: has one subfolder per class; a class without one has no examples here.
        classes: the classes' names, in the order of the labels.
        encoding: the images' encoding.
    """

    folder: Path
    classes: tuple[str, ...]
    encoding: ImageEncoding

    @cached_property
    def _files(self) -> list[tuple[Path, int]]:
        labels = {name: label for label, name in enumerate(self.classes)}
        files: list[tuple[Path, int]] = []
        others: list[Path] = []
        classes: dict[Path, str] = {}  # of the folders
        for name in class_folders(self.folder):
            if name not in labels:
                raise ConfigError(
                    f"{self.folder} has a subfolder {name!r}, but the classes are: "
                    f"{', '.join(self.classes)}; rename it or set task.classes"
                )
            for folder in folders_below(self.folder / name):
                first = classes.setdefault(folder.resolve(), name)
                if first != name:
                    raise ConfigError(
                        f"{folder} links to a folder of the class {first}, and is in the class "
                        f"{name}: remove the link"
                    )
                images, more = images_in(folder)
                files += [(path, labels[name]) for path in images]
                others += more
        warn_of_others(self.folder, others)
        return files

    @property
    def identity(self) -> dict[str, object]:
        """The current files, and how they are read."""
        digest = hashlib.sha256()
        for path, label in self._files:
            stat = path.stat()
            line = f"{path} {label} {stat.st_size} {stat.st_mtime_ns}\n"
            digest.update(os.fsencode(line))  # a file's name need not be UTF-8
        return {
            "folder": str(self.folder.resolve()),
            "files": digest.hexdigest(),
            "classes": list(self.classes),
            **self.encoding.identity,
        }

    @property
    def origin(self) -> dict[str, object]:
        """The folder."""
        return {"folder": str(self.folder.resolve())}

    def count(self) -> int:
        """Return the number of images."""
        return len(self._files)

    def records(self) -> Iterator[Record]:
        """Yield the images class by class."""
        for path, label in self._files:
            yield Record(self.encoding.decode(path, path), label)
