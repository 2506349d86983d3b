"""The wheel, made by way of a source distribution: what is in it, and a project that imports it.

tests/releases.py installs it in empty environments (`make test-releases`).
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheel import ROOT, build_wheel, run_project

pytestmark = pytest.mark.flower  # builds in processes, seconds


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build_wheel(tmp_path_factory.mktemp("build")))


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the wheel's content; on PYTHONPATH it stands before the clone."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = wheel.namelist()
    assert len(names) == len(set(names))
    (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    package = {name for name in names if not name.startswith(metadata.removesuffix("METADATA"))}
    wanted = {
        Path(folder, name).relative_to(ROOT).as_posix()
        for folder, _, files in os.walk(ROOT / "fedhet", followlinks=True)
        for name in files
        if not name.endswith(".pyc")
    }
    assert {
        "fedhet/py.typed",
        "fedhet/report/templates/page.css",
        "fedhet/strategies/maecho.py",
    } <= wanted
    table = "fedhet/reproductions/feddw/conf/experiment/feddw/table1.yaml"
    assert {"fedhet/conf/config.yaml", table} <= wanted
    assert package == wanted
    for name in package:
        assert wheel.read(name) == (ROOT / name).read_bytes(), name
    assert b"Do Not Upload" not in wheel.read(metadata)


def test_import_fedhet_imports_no_torch(installed, tmp_path):
    code = (
        "import sys, fedhet; print(fedhet.__file__, *{'torch', 'flwr', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(installed / "fedhet" / "__init__.py")]


def test_a_project_with_strategies_and_client_app_of_its_own_runs(installed, tmp_path):
    summary = run_project(tmp_path, Path(sys.executable), {"PYTHONPATH": str(installed)})
    assert summary["status"] == "completed"
    assert summary["rounds"] == 2
