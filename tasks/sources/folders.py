"""Folders of examples; their errors are here, because a site does not send those of its data."""

from __future__ import annotations

from pathlib import Path

from fedhet.common.errors import ConfigError, SetupError


def require_folder(folder: Path, key: str) -> Path:
    """Return the folder if it exists; the error names ``key``, which sets it."""
    if not folder.is_dir():
        raise SetupError(f"{folder} is not a folder: change {key}")
    return folder


def files_in(folder: Path) -> list[Path]:
    """Return the files in a folder by name, linked ones too, without hidden ones.

    Raises:
        ConfigError: for a pipe, a device or a link to nothing, which cannot be read as a file.
    """
    paths = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".")]
    for path in paths:
        if not path.is_file() and not path.is_dir():
            raise ConfigError(
                f"{path} is not a file, but a pipe, a device or a link to nothing: remove it"
            )
    return [path for path in paths if path.is_file()]
