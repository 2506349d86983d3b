"""Fixtures of these tests."""

from tests.finished_runs import finished_run, no_pictures, write_run

__all__ = ["finished_run", "no_pictures", "write_run"]
