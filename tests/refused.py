"""The form of every error of a user's: its class, one line, and what it names."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fedhet.common.errors import ConfigError

Kind = type[Exception] | tuple[type[Exception], ...]


@contextmanager
def refused(*named: str, kind: Kind = ConfigError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Expect an error of a class that names these keys, values and files; its words are free."""
    with pytest.raises(kind) as error:
        yield error
    text = str(error.value)
    missing = [one for one in named if one not in text]
    assert not missing, f"{missing} not in: {text}"
    assert "\n" not in text or not isinstance(error.value, ConfigError), text
