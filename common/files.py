"""Files that are written whole or not at all, folders with one writer, and the end of a log."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import dropwhile
from pathlib import Path

from fedhet.common.errors import ConfigError

LOCK = ".lock"  # file in a folder while a process writes into the folder
# files that a killed process leaves; safetensors writes a temporary file of its own first
_UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}|\.tmp[A-Za-z0-9]{6}")


def save_text(path: Path, text: str) -> None:
    """Write a text file atomically: a reader finds the old file or the new one, whole.

    Raises:
        OSError: if it cannot be written, as on a full disk; ``path`` is unchanged.
    """
    replace_file(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file beside ``path``, flush it to disk and rename it to ``path``.

    The umask decides who may read the file, as for any file.

    Raises:
        OSError: if it cannot be written, as on a full disk; ``path`` is unchanged.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with _removed_on_error(beside, path):
        beside.touch()
        mode = beside.stat().st_mode
        write(beside)
        beside.chmod(mode)  # safetensors writes files that only their owner may read
        with beside.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)


@contextmanager
def _removed_on_error(beside: Path, path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        with suppress(OSError):  # on a read-only file system there is nothing to remove
            beside.unlink()
        if isinstance(error, OSError):  # its text names the temporary file, or no file
            what = f"[Errno {error.errno}] {error.strerror}" if error.strerror else error
            raise OSError(f"{path} could not be written: {what}") from error
        raise


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files that killed processes have left of :func:`replace_file`.

    Call it only if no other process writes into the folder.
    """
    for path in folder.rglob(".*"):
        if _UNFINISHED.fullmatch(path.name) and not path.is_dir():
            path.unlink(missing_ok=True)


def subfolders(folder: Path, seen: set[Path]) -> list[Path]:
    """Return the folders in a folder by name, without hidden ones; links to folders are followed.

    Each folder is returned once in a walk whose steps share ``seen``, and a link to a folder that
    holds it never is, so no loop of links is endless.
    """
    here = folder.resolve()
    seen.add(here)
    found: list[Path] = []
    for child in sorted(folder.iterdir()):
        if child.name.startswith(".") or not child.is_dir():
            continue
        real = child.resolve()
        if real not in seen and not here.is_relative_to(real):
            seen.add(real)
            found.append(child)
    return found


def folders_below(folder: Path, seen: set[Path] | None = None) -> Iterator[Path]:
    """Yield a folder and all below it; see :func:`subfolders`."""
    seen = set() if seen is None else seen
    yield folder
    for child in subfolders(folder, seen):
        yield from folders_below(child, seen)


def stamp(place: str) -> tuple[object, ...]:
    """Return what changes if a file, or one that is directly in a folder, is written anew.

    It is empty for a place that is not there, such as a name on the Hugging Face hub.
    """
    path = Path(place).expanduser()
    try:
        inside = sorted(os.scandir(path), key=lambda one: one.name) if path.is_dir() else ()
        stats = [path.stat(), *(one.stat() for one in inside if one.is_file())]
    except OSError:
        return ()
    return tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)


def last_lines(path: Path, count: int) -> str:
    """Return the last ``count`` lines of a log that are not blank."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return "\n".join(lines[-count:]) or "(the log is empty)"


def last_error(path: Path) -> str:
    """Return the message of the traceback that a log ends with, without the lines of the stack.

    The class of fedhet's own errors is left out, because their messages suffice. Return the last
    lines if the log has no traceback.
    """
    text = path.read_text(errors="replace")
    _, found, after = text.rpartition("Traceback (most recent call last):\n")
    if not found:
        return last_lines(path, 3)
    message = "\n".join(dropwhile(lambda line: line.startswith(" "), after.splitlines()))
    return re.sub(r"^fedhet\.[\w.]+: ", "", message).strip()


def expanded(path: str, key: str) -> Path:
    """Return a path with the home folder in place of ``~``; errors name the recipe's ``key``."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigError(f"{key}={path}: there is no such user, or no home folder") from None


def writable_folder(folder: Path, option: str = "results_dir=") -> Path:
    """Make a folder, if it is not there, and return it.

    Args:
        folder: the folder to write to.
        option: what names the folder in the error, such as ``--out`` and a space; may be "".

    Raises:
        ConfigError: if it cannot be made or written to.
    """
    if reason := _why_not_writable(folder):
        verb = "name" if option else "go to"
        raise ConfigError(f"{option}{folder} {reason}: {verb} a folder that you can write to")
    return folder


def writable_file(path: Path, option: str) -> Path:
    """Make the folder of a file that will be written, if it is not there, and return the file.

    Call it before the work whose result the file will hold. ``option`` names the file in errors.

    Raises:
        ConfigError: if the path is not a file, or its folder cannot be made or written to.
    """
    if path.is_dir():
        raise ConfigError(f"{option}{path} is a folder: name a file")
    if path.exists() and not path.is_file():  # a new file would replace /dev/null
        raise ConfigError(f"{option}{path} is a device or a pipe: name a file")
    if reason := _why_not_writable(path.parent):
        raise ConfigError(
            f"{option}{path} cannot be written, because {path.parent.absolute()} {reason}: name a "
            "file in a folder that you can write to"
        )
    return path


def _why_not_writable(folder: Path) -> str:
    """Make a folder, if it is not there; return why nothing can be written to it, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"cannot be made ({error.strerror})"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "is not writable"


@contextmanager
def only_writer(folder: Path, patience: float, name: str = LOCK) -> Iterator[None]:
    """Reserve a results directory for this process, inside the block or until the process ends.

    Args:
        folder: an existing folder.
        patience: seconds to wait for another process; a stopped process takes some to end.
        name: name of the lock's file in the folder.

    Raises:
        ConfigError: if another process has it, as after two commands with ``resume=true``.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / name)
    try:
        lock.acquire(timeout=patience)
    except Timeout:
        raise ConfigError(
            f"results_dir={folder} is in use: another process writes to it. Wait for that process, "
            "stop it, or name another folder. If there is no such process, because the file system "
            f"has no locks, remove {name} in the folder"
        ) from None
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()
