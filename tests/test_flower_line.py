"""Which line of Flower a release belongs to, and what is said about a release nobody has tried."""

import pytest

from fedhet.common.flower.line import (
    NEWEST,
    OLDEST,
    GrpcLine,
    HttpLine,
    installed_release,
    line_of,
    untried,
)
from fedhet.server_app import app
from tests.recipes import TINY, run_recipe
from tests.refused import refused


def test_both_lines_are_supported():
    assert isinstance(line_of("1.39.0"), GrpcLine)
    for release in ("1.40.0", "1.41.2", "1.42.0", "1.43.0", "1.44.0.dev20261201", "2.0.0"):
        assert isinstance(line_of(release), HttpLine)
    assert line_of("1.42.0") is line_of("1.40.0")


@pytest.mark.parametrize("release", ["1.38.1", "1.4.0", "0.19.0"])
def test_an_older_release_is_refused(release):
    with refused(release, "1.39"):
        line_of(release)


def test_a_newer_release_than_any_that_was_tried_is_only_a_warning():
    for release in (installed_release(), f"{OLDEST}.0", f"{NEWEST}.7"):
        assert untried(release) is None
    for release in ("1.99.0", "2.0.0"):
        assert release in str(untried(release))


@pytest.mark.slow
def test_a_run_with_a_newer_release_says_so_in_its_log(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(app, "installed_release", lambda: "1.99.0")
    run_recipe(tmp_path / "run", *TINY, "rounds=0")
    assert "flwr 1.99.0 is newer than fedhet was tried with" in caplog.text
