"""The report's fixtures: finished runs."""

from tests.fedhet.report.conftest import *  # noqa: F403
