"""Issue: a SuperNode that the SuperLink refuses looks like one that it has let in.

Both answer at /health and have a connection. With this a SuperNode makes a file once it is let in,
which docker/health.py looks for.
Mends: `flwr.supernode.start_client_internal._init_connection`.
Releases: 1.39 to 1.42. Not needed when /health fails before that:
`tests/drills/test_docker.py::test_a_supernode_is_healthy_once_the_superlink_has_let_it_in`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def install(activated: Path) -> None:
    """Let this process's SuperNode make a file when the SuperLink has let it in."""
    from flwr.supernode import start_client_internal

    activated.unlink(missing_ok=True)
    connect = start_client_internal._init_connection

    @contextmanager
    def connect_and_tell(*words: Any, **options: Any) -> Iterator[Any]:
        with connect(*words, **options) as connection:
            activated.touch()
            yield connection

    start_client_internal._init_connection = connect_and_tell
