"""Text files that a user names: their encoding, their dialect, and one form of error."""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedhet.common.errors import ConfigError, DamagedFileError, SetupError, require_choice

if TYPE_CHECKING:  # pandas takes a second to import
    from pandas import DataFrame

_MARKS = {  # byte order marks, the longer ones first
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_OTHERS = {  # the first bytes of files that are no text
    b"\x1f\x8b": "a gzip archive: unpack it",
    b"PK\x03\x04": "a ZIP archive, perhaps of a spreadsheet: unpack it, or export it as CSV",
    b"PAR1": "a Parquet file: name it .parquet",
}
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
DECIMALS = {"point": ".", "comma": ","}


@dataclass(frozen=True)
class Dialect:
    """How a CSV file is written.

    Attributes:
        separator: what stands between two fields: one of SEPARATORS, or its name.
        decimal: the decimal point of a number: one of DECIMALS, or its name.
        encoding: of the text; None: a byte order mark's, or else UTF-8.
        group: the group of the recipe's keys that change these values, such as
            ``task.data_options``; "": they cannot be changed.
    """

    separator: str = ","
    decimal: str = "."
    encoding: str | None = None
    group: str = ""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, known in (("separator", SEPARATORS), ("decimal", DECIMALS)):
            value = known.get(getattr(self, name), getattr(self, name))
            require_choice(self.key(name), value, known.values())
            object.__setattr__(self, name, value)
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError:
            raise ConfigError(
                f"{self.key('encoding')}={self.encoding} is not a text encoding: set it to utf-8, "
                "latin-1, cp1252 or another that Python has"
            ) from None

    def key(self, name: str) -> str:
        """Return the recipe's key of a value."""
        return f"{self.group}.{name}" if self.group else name


def require_file(path: Path, key: str) -> None:
    """Reject a path that is no regular file; a pipe or a device would never end."""
    if not path.exists():
        raise SetupError(f"{path} does not exist (from {Path.cwd()}){_change(key)}")
    if not path.is_file():
        raise SetupError(f"{path} is not a file, but a folder, a pipe or a device{_change(key)}")


def read_text(path: Path, key: str) -> str:
    """Return the text of a file that the recipe's ``key`` names.

    Raises:
        SetupError: if it is no file.
        DamagedFileError: if it is no text in UTF-8.
    """
    dialect = Dialect()
    require_file(path, key)
    encoding = _encoding(path, key, dialect)
    try:
        return path.read_bytes().decode(encoding)
    except UnicodeError as error:
        raise _not_of(encoding, path, key, dialect, error) from None
    except OSError as error:
        raise DamagedFileError(f"{_named(path, key)} cannot be read: {error.strerror}") from None


def read_json(path: Path, key: str) -> Any:
    """Return what a JSON file has; errors as of :func:`read_text`."""
    try:
        return json.loads(read_text(path, key))
    except (json.JSONDecodeError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise DamagedFileError(f"{_named(path, key)} cannot be read as JSON: {why}") from None


def read_csv(path: Path, key: str, dialect: Dialect | None = None) -> DataFrame:
    """Return the fields of a CSV file as text; an empty one, NA, None and the like are missing.

    Its header must name each column once: pandas itself would call columns "a.1" and "Unnamed: 0",
    and take the first column for an index if rows have more fields than the header.

    Args:
        path: the file.
        key: the recipe's key that names it.
        dialect: how it is written.
    """
    import pandas

    dialect = dialect or Dialect()
    require_file(path, key)
    encoding = _encoding(path, key, dialect)
    how: Any = {"sep": dialect.separator, "encoding": encoding, "dtype": "string"}
    how |= {"compression": None}
    try:
        header = pandas.read_csv(path, header=None, nrows=1, keep_default_na=False, **how)
        names = header.iloc[0].tolist()
        _check_header(names, dialect)
        table = pandas.read_csv(path, **how)
        if not isinstance(table.index, pandas.RangeIndex):
            raise ValueError(f"its rows have more fields than its header, which has {len(names)}")
    except UnicodeError as error:
        raise _not_of(encoding, path, key, dialect, error) from None
    except (OSError, ValueError) as error:  # includes pandas' own
        said = " ".join(str(error).split())  # in one line
        raise DamagedFileError(f"{_named(path, key)} cannot be read as a table: {said}") from None
    return table


def _check_header(names: list[str], dialect: Dialect) -> None:
    """Reject a header with a column that has no name, or another's, or with other separators."""
    if "" in names:
        raise ValueError(f"field {names.index('') + 1} of its header is empty: name or remove it")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"its header has {', '.join(twice)} twice")
    for name, other in SEPARATORS.items():
        if len(names) == 1 and other in names[0]:
            cure = f"set {dialect.key('separator')}={name}" if dialect.group else "use commas"
            raise ValueError(
                f"its header is one field, {names[0]!r}, which looks like several with a {name} "
                f"between them: {cure}"
            )


def _encoding(path: Path, key: str, dialect: Dialect) -> str:
    """Return the encoding of a file's text by its first bytes, or else the dialect's."""
    with path.open("rb") as file:
        head = file.read(512)
    for magic, what in _OTHERS.items():
        if head.startswith(magic):
            raise DamagedFileError(f"{_named(path, key)} is no text, but {what}")
    for mark, encoding in _MARKS.items():
        if head.startswith(mark):
            return encoding
    if dialect.encoding is None and b"\0" in head:
        raise _not_of("utf-8", path, key, dialect, "it has bytes of value 0, as in UTF-16")
    return dialect.encoding or "utf-8"


def _not_of(
    encoding: str, path: Path, key: str, dialect: Dialect, error: object
) -> DamagedFileError:
    cure = "save it as UTF-8"
    if dialect.group:
        cure += f", or set {dialect.key('encoding')} (latin-1, cp1252 or utf-16, say)"
    if isinstance(error, UnicodeError):  # its own text would quote the file
        error = f"the first wrong bytes are in line {_wrong_line(path, encoding)}"
    return DamagedFileError(f"{_named(path, key)} is not {encoding.upper()} text ({error}): {cure}")


def _wrong_line(path: Path, encoding: str) -> int:
    """Return the first line that cannot be decoded."""
    decoder = codecs.getincrementaldecoder(encoding)()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                decoder.decode(line)
            except UnicodeError:
                return number
    return number


def _change(key: str) -> str:
    return f": change {key}" if key else ""


def _named(path: Path, key: str) -> str:
    return f"{path} ({key})" if key else str(path)
