"""fedhet-policy: checks a site's policy, and says what it forbids of a run (docs/policy.md).

    fedhet-policy policy.yaml                                  # the rules
    fedhet-policy policy.yaml strategy=feddw rounds=100        # and what they forbid of this run

The exit code is 1 if the file is wrong, or forbids something.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fedhet.client_app.policy import forbidden_by_run, read_policy, stamp_of
from fedhet.commands import reported_errors
from fedhet.common.configured import Configured, shown
from fedhet.common.errors import ConfigError
from fedhet.common.files import expanded


def main() -> None:
    """Run the command."""
    if len(sys.argv) < 2 or {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    with reported_errors("fedhet-policy"):
        path, words = expanded(sys.argv[1], "policy"), sys.argv[2:]
        print(*_lines(read_policy(path)), sep="\n")
        forbidden = forbidden_by_run(path, stamp_of(path), tuple(words), "") if words else ()
        if forbidden:
            raise ConfigError(f"{path} forbids {'; '.join(forbidden)}")


def _lines(rules: Configured) -> Iterator[str]:
    """Yield the rules that are given, as keys and values."""
    for name in rules.given:
        value = getattr(rules, name)
        if isinstance(value, Configured):
            yield from _lines(value)
        else:
            yield f"{rules.section}.{name}={shown(value)}".lstrip(".")
