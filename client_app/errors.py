"""What a site tells the server of an error: nothing that its data may have said.

An exception's text may quote a label, a row or a whole document, above all that of the user's own
functions and of other libraries. It stays in the site's log.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

from fedhet.common.errors import SetupError
from fedhet.common.outside import no_exit

# What runs the user's functions and modules, whose errors may quote the data.
_READS_DATA = ("fedhet.tasks.", "fedhet.common.outside.", "fedhet.common.text_files.")


class SiteError(RuntimeError):
    """An error at a site; the message is what the server may know of it."""


@contextlib.contextmanager
def kept_at_site(site: str) -> Iterator[None]:
    """Raise a SiteError that names the site; its cause, in the site's log, says the rest."""
    try:
        with no_exit("the user's code"):
            yield
    except Exception as error:
        raise SiteError(told(error, site)) from error


def told(error: Exception, site: str) -> str:
    """Return fedhet's own text unless the error comes from reading data; else type and place.

    Of the system's errors fedhet writes the text, too: a file, and what is wrong with its disk.
    """
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    raised_in = str(frame.f_globals.get("__name__"))
    own = type(error).__module__.startswith("fedhet.") or isinstance(error, OSError)
    reads_data = not raised_in.startswith("fedhet.") or f"{raised_in}.".startswith(_READS_DATA)
    if isinstance(error, SetupError) or (own and not reads_data):
        return str(error)
    place = f"{type(error).__name__} in {raised_in}, line {line}"
    return f"{site}: {place}; the site's log has its text"
