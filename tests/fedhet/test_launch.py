"""The command up to the start of Flower: what it refuses, and where results go."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from fedhet.runtimes import flower_install
from fedhet.runtimes.flower_install import LaunchError, check_flower
from tests.fedhet.sweep.sweeps import FEDHET, run_in

pytestmark = pytest.mark.flower

ROOT = Path(__file__).parents[2]


def test_help_and_an_unknown_option_or_key_leave_no_trace(tmp_path):
    done = run_in(tmp_path, FEDHET, "--help")
    assert done.returncode == 0
    assert "strategy: " in done.stdout
    for word, named in (("strategy=fedavgg", ["fedavgg", "scaffold"]), ("roundz=3", ["roundz"])):
        done = run_in(tmp_path, FEDHET, word)
        assert done.returncode == 1
        assert all(name in done.stderr for name in named)
    assert not list(tmp_path.iterdir())


def test_what_cannot_start_is_refused_in_one_line(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for word, message in {
        "results_dir=full": "full is not empty: .* resume=true",
        "results_dir=full/file": "is a file",
        "resume=true": "results_dir=",
        "runtime.name=moon": "runtime=moon",
    }.items():
        done = run_in(tmp_path, FEDHET, word)
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert re.search(message, done.stderr)


def test_another_flower_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(flower_install.importlib.metadata, "version", lambda _: "1.41.0")
    with pytest.raises(LaunchError, match=r"flwr 1\.41\.0 is installed.*1\.39"):
        check_flower()


def test_the_launched_app_is_the_one_of_pyproject():
    launched = tomllib.loads(flower_install._APP.format(version="1"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for part in ("publisher", "components"):
        assert launched["tool"]["flwr"]["app"][part] == project["tool"]["flwr"]["app"][part]
    assert launched["project"]["name"] == project["project"]["name"]
