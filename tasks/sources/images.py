"""Images from scikit-learn, from tables or from folders with one subfolder per class."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from logging import WARNING, getLogger
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedhet.common.errors import ConfigError, SetupError
from fedhet.common.files import folders_below, subfolders
from fedhet.common.text_files import read_csv
from fedhet.tasks.config import ImageConfig
from fedhet.tasks.sources.arrays import Record, Split
from fedhet.tasks.sources.encodings import ImageEncoding
from fedhet.tasks.sources.folders import files_in, require_folder
from fedhet.tasks.sources.source import Source
from fedhet.tasks.sources.store import Decoder
from fedhet.tasks.sources.tables import SourceColumns

METADATA, FILE_NAME = "metadata.csv", "file_name"  # as Hugging Face's ImageFolder has them
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
    def columns(self) -> SourceColumns:
        """The tables' columns."""
        return SourceColumns(
            self.task.image_column, self.task.label_column, self.task.client_column
        )

    def class_names(self) -> tuple[str, ...]:
        """Return the classes in the order of their labels; may read the data folder."""
        if self.task.class_names is None and self.task.source == "image_folder":
            return _training_classes(self._image_folder(), self._train_folders())
        return super().class_names()

    def load(self) -> tuple[Split, Split]:
        """Return the training and the test split, decoded; log the classes without an image."""
        train, test = super().load()
        if self.task.source == "image_folder":
            held = set(train.labels.tolist())
            names = [name for n, name in enumerate(self.class_names()) if n not in held]
            if names:
                text = "%s: no training image of %s"
                getLogger("flwr").log(WARNING, text, self._image_folder(), ", ".join(names))
        return train, test

    def _train_decoder(self) -> Decoder:
        if self.task.source == "embedded":
            return DigitsDecoder(self.encoding)
        if self.task.source == "image_folder":
            return self._folders(self._train_folders(), self.task.client_column)
        return super()._train_decoder()

    def _test_decoder(self) -> Decoder | None:
        if self.task.source == "image_folder":
            found = {name: one for name, one in self._split_folders("test").items() if one.is_dir()}
            return self._folders(found, self.task.client_column) if found else None
        return None if self.task.source == "embedded" else super()._test_decoder()

    def _site_decoder(self, folder: Path, split: str) -> Decoder | None:
        decoder = super()._site_decoder(folder, split)
        if decoder is None and (folder / split).is_dir():
            return self._folders({"": folder / split})
        return decoder

    def num_clients(self, min_size: int) -> int | None:
        """Count the clients with that many images, test images among them, without decoding."""
        if self.task.source != "image_folder":
            return None
        sizes = self._folders(self._train_folders(), self.task.client_column).client_sizes
        return sum(size >= min_size for size in sizes.values()) or None

    def _image_folder(self) -> Path:
        if self.task.path is not None:
            return require_folder(Path(self.task.path).expanduser(), "task.path")
        root = os.environ.get("FEDHET_DATA")
        if root is None:
            raise SetupError(
                "task.path is not set: it names the folder with train/ and, optionally, test/"
            )
        return require_folder(Path(root) / self.task.name, "task.path or FEDHET_DATA")

    def _split_folders(self, split: str) -> dict[str, Path]:
        """Return a split's folder, or those of all sites by the sites' names; some may not exist.

        A site's folder has train/ and perhaps test/, as with partition=site.
        """
        root = self._image_folder()
        if (root / "train").is_dir() or (root / "test").is_dir():
            return {"": root / split}
        return {site.name: site / split for site in subfolders(root, set())}

    def _train_folders(self) -> dict[str, Path]:
        folders = self._split_folders("train")
        lacking = [folder.parent for folder in folders.values() if not folder.is_dir()]
        if lacking or not folders:
            alone = len(lacking) == len(folders)
            raise SetupError(
                f"{self._image_folder() if alone else lacking[0]} has no subfolder train/ with one "
                "subfolder per class (nor test/, which is enough to evaluate)"
                + (", and no folders of sites that have one: change task.path" if alone else "")
            )
        return folders

    def _folders(self, folders: dict[str, Path], client_column: str | None = None) -> FolderDecoder:
        return FolderDecoder(folders, self.class_names(), self.encoding, client_column)


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the subfolders, the classes, in alphabetical order."""
    names = [path.name for path in subfolders(folder, set())]
    if not names:
        raise ConfigError(f"{folder} has no subfolder: make one with images for each class")
    return tuple(names)


def _training_classes(root: Path, folders: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the classes that the folders' subfolders name; there must be at least two."""
    names = sorted({name for folder in folders.values() for name in class_folders(folder)})
    if len(names) < 2:
        raise ConfigError(
            f"{folders.get('', root)} has one subfolder, {names[0]}, but needs one for each of at "
            "least two classes: perhaps the images are one folder too deep"
        )
    return tuple(names)


def _clients_in(folder: Path, column: str) -> dict[Path, str]:
    """Return whose each image of a folder is, as its metadata.csv says (of Hugging Face's form)."""
    path = folder / METADATA
    table = read_csv(path, "task.client_column")
    for name in (FILE_NAME, column):
        if name not in table.columns:
            raise ConfigError(
                f"{path} has no column {name} (task.client_column={column}); it has: "
                f"{', '.join(table.columns)}"
            )
    known = table[[FILE_NAME, column]].dropna()
    pairs = zip(known[FILE_NAME].tolist(), known[column].tolist(), strict=True)
    return {folder / name: client for name, client in pairs}


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
    """One split as an image folder, or as one for each site.

    Attributes:
        folders: by the sites' names, "" if nothing names one; each has one subfolder per class, and
            a class without one has no examples there.
        classes: the classes' names, in the order of the labels.
        encoding: the images' encoding.
        client_column: column of the folders' metadata.csv that says whose an image is.
    """

    folders: Mapping[str, Path]
    classes: tuple[str, ...]
    encoding: ImageEncoding
    client_column: str | None = None

    @cached_property
    def _files(self) -> list[tuple[Path, int, str | None]]:
        """The images, their labels and whose they are."""
        found: list[tuple[Path, int, str | None]] = []
        for site, folder in self.folders.items():
            files = self._labelled(folder)
            if site and not files:
                raise ConfigError(f"{folder} has no image: add some, or remove the site's folder")
            if self.client_column is None:
                found += [(path, label, site or None) for path, label in files]
                continue
            clients = _clients_in(folder, self.client_column)
            if unknown := [path for path, _ in files if path not in clients]:
                raise ConfigError(
                    f"{folder / METADATA} has no {self.client_column} (task.client_column) of "
                    f"{unknown[0].relative_to(folder)} ({FILE_NAME}): whose is it?"
                )
            found += [(path, label, clients[path]) for path, label in files]
        return found

    def _labelled(self, root: Path) -> list[tuple[Path, int]]:
        labels = {name: label for label, name in enumerate(self.classes)}
        files: list[tuple[Path, int]] = []
        others: list[Path] = []
        classes: dict[Path, str] = {}  # of the folders
        for name in class_folders(root):
            if name not in labels:
                raise ConfigError(
                    f"{root} has a subfolder {name!r}, but the classes are: "
                    f"{', '.join(self.classes)}; rename it or set task.classes"
                )
            for folder in folders_below(root / name):
                first = classes.setdefault(folder.resolve(), name)
                if first != name:
                    raise ConfigError(
                        f"{folder} links to a folder of the class {first}, and is in the class "
                        f"{name}: remove the link"
                    )
                images, more = images_in(folder)
                files += [(path, labels[name]) for path in images]
                others += more
        warn_of_others(root, others)
        return files

    @property
    def client_sizes(self) -> Counter[str]:
        """How many images each client has."""
        return Counter(client for *_, client in self._files if client is not None)

    @property
    def identity(self) -> dict[str, object]:
        """The current files, and how they are read."""
        digest = hashlib.sha256()
        for path, label, client in self._files:
            stat = path.stat()
            whose = "" if client is None else f" {client}"
            line = f"{path} {label} {stat.st_size} {stat.st_mtime_ns}{whose}\n"
            digest.update(os.fsencode(line))  # a file's name need not be UTF-8
        files = {"files": digest.hexdigest(), "classes": list(self.classes)}
        return {**self.origin, **files, **self.encoding.identity}

    @property
    def origin(self) -> dict[str, object]:
        """The folder, or the folders of all sites."""
        return {"folder": ", ".join(str(one.resolve()) for one in self.folders.values())}

    def count(self) -> int:
        """Return the number of images."""
        return len(self._files)

    def records(self) -> Iterator[Record]:
        """Yield the images class by class."""
        for path, label, client in self._files:
            yield Record(self.encoding.decode(path, path), label, client)
