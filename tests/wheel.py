"""Builds fedhet's wheel, and runs a project that uses it, outside the clone."""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhet.conf import PACKAGES
from tests.processes import summary_of

ROOT = Path(__file__).resolve().parents[1]
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"
# Ray's own usage statistics and Flower's event log both look for a network.
OFFLINE = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0"}


def build_wheel(folder: Path) -> Path:
    """Build the wheel of a source distribution of this clone, all of it below ``folder``."""
    source = folder / "source"
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for package in (*PACKAGES, "reproductions", "fedhet"):
        shutil.copytree(ROOT / package, source / package, symlinks=True, ignore=leave_out)
    for name in ("pyproject.toml", "MANIFEST.in", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-c", BUILD.format("build_sdist"), str(folder)], source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    run([sys.executable, "-c", BUILD.format("build_wheel"), str(folder)], unpacked)
    (wheel,) = folder.glob("*.whl")
    return wheel


def run_project(folder: Path, python: Path, variables: Mapping[str, str] = {}) -> dict[str, Any]:
    """Run a copy of tests/own_project with another Python; return the summary of its run."""
    project = folder / "project"
    shutil.copytree(ROOT / "tests" / "own_project", project)
    run([str(python), "run.py"], project, variables)
    return summary_of(project / "results")


def run(command: list[str], folder: Path, variables: Mapping[str, str] = {}) -> str:
    """Run a command to its end and return its output; raise with that if it fails."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | OFFLINE | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout
