"""Fixtures of these tests."""

from tests.finished_runs import no_pictures, write_run

__all__ = ["no_pictures", "write_run"]
