"""Issue: a request to a SuperLink fails if its database is locked for 5 s.

SQLite gives turns by chance. If several sites send large replies at the same time, a request fails,
and with it the run, or a node if it is a heartbeat.
Mends: `flwr.supercore.sql_mixin.SQLITE_PRAGMAS`.
Releases: 1.39 to 1.42. Not needed when Flower itself waits longer:
`tests/drills/test_docker.py::test_a_superlink_waits_a_minute_for_its_database`.
"""

from __future__ import annotations

LOCK_SECONDS = 60


def install() -> None:
    """Let each request wait a minute for its turn to write to the SuperLink's database."""
    from flwr.supercore import sql_mixin

    name = "SQLITE_PRAGMAS"
    before = dict(vars(sql_mixin)[name])
    vars(sql_mixin)[name] = tuple({**before, "busy_timeout": str(1000 * LOCK_SECONDS)}.items())
