"""Images in folders, one subfolder a class."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from common.errors import ConfigError
from tasks.sources.arrays import Record
from tasks.sources.encodings import ImageEncoding

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the subfolders in alphabetical order: the classes.

    Raises:
        ConfigError: where there is none.
    """
    names = sorted(path.name for path in folder.iterdir() if _is_class(path))
    if not names:
        raise ConfigError(f"{folder} has no subfolder: one a class, with its images, is expected")
    return tuple(names)


def _is_class(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


@dataclass(frozen=True)
class FolderDecoder:
    """One split as an image folder.

    Attributes:
        folder: holds one subfolder a class; a class without one has no examples here.
        classes: their names, in the order of the labels.
        encoding: of the images.
    """

    folder: Path
    classes: tuple[str, ...]
    encoding: ImageEncoding

    @cached_property
    def _files(self) -> list[tuple[Path, int]]:
        labels = {name: label for label, name in enumerate(self.classes)}
        files = []
        for name in class_folders(self.folder):
            if name not in labels:
                raise ConfigError(
                    f"{self.folder} has a subfolder {name!r} and the classes are: "
                    f"{', '.join(self.classes)}; rename it or set task.classes"
                )
            images = (self.folder / name).rglob("*")
            chosen = sorted(path for path in images if path.suffix.lower() in SUFFIXES)
            files += [(path, labels[name]) for path in chosen]
        return files

    @property
    def identity(self) -> dict[str, object]:
        """The files as they are now, and how they are read."""
        digest = hashlib.sha256()
        for path, label in self._files:
            stat = path.stat()
            digest.update(f"{path} {label} {stat.st_size} {stat.st_mtime_ns}\n".encode())
        return {
            "folder": str(self.folder.resolve()),
            "files": digest.hexdigest(),
            "classes": list(self.classes),
            **self.encoding.identity,
        }

    def count(self) -> int:
        """Return the number of images."""
        return len(self._files)

    def records(self) -> Iterator[Record]:
        """Yield the images class by class."""
        from PIL import UnidentifiedImageError

        from tasks.sources.pixels import decode_image

        for path, label in self._files:
            try:
                yield Record(decode_image(path, self.encoding.shape), label)
            except (UnidentifiedImageError, OSError) as error:
                raise ConfigError(f"{path} cannot be read as an image: {error}") from error
