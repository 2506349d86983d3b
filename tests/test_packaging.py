"""What is installed, what Flower bundles, and the dependencies that pyproject.toml declares."""

import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fedhet.common.flower.line import NEWEST, OLDEST
from fedhet.common.nested import flat
from fedhet.conf import PACKAGES, compose
from fedhet.conf.experiments import experiment_files
from fedhet.tools.new import TEMPLATE
from tests.test_imports import imported

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OWN = {*PACKAGES, "fedhet", "reproductions"}
# In parts, so that this file does not name what it forbids.
HOSTS = ["pypi" + ".org", "python" + "hosted", "download.py" + "torch", "registry." + "npmjs"]


def requirements(*extras: str) -> list[Requirement]:
    groups = PROJECT["project"]["optional-dependencies"]
    chosen = [groups[extra] for extra in extras or groups]
    return [Requirement(word) for word in chain(PROJECT["project"]["dependencies"], *chosen)]


def sources() -> dict[str, Path]:
    """Return what a clone holds that Flower could bundle, by path."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in {".venv", ".git", "__pycache__"}]
        found += [Path(folder, name) for name in files]
    return {path.relative_to(ROOT).as_posix(): path for path in found}


@pytest.mark.flower  # a process of uv's, seconds
def test_the_sync_before_a_run_installs_nothing_and_needs_no_network(tmp_path):
    excluded = {canonicalize_name(name) for name in PROJECT["tool"]["uv"]["exclude-dependencies"]}
    assert excluded == {canonicalize_name(requirement.name) for requirement in requirements()}
    app, environment = tmp_path / "app", tmp_path / "environment"
    app.mkdir()
    shutil.copy(ROOT / "pyproject.toml", app)
    command = [sys.executable, "-m", "uv", "sync", "--python", sys.executable]
    # As flwr.supercore.superexec.dependency_installer calls it.
    command += ["--no-install-project", "--no-install-package", "flwr", "--inexact"]
    variables = {"UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path / "cache")}
    variables |= {"UV_PROJECT_ENVIRONMENT": str(environment)}
    done = subprocess.run(
        command, cwd=app, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(environment.rglob("*.dist-info"))


def test_constraints_pin_every_direct_dependency_within_its_range():
    for line, release in (("", NEWEST), (OLDEST, OLDEST), (NEWEST, NEWEST)):
        pins = pinned(line)
        for requirement in requirements():
            pin = pins[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}"
            assert "+" not in pin
        assert pins["flwr"] == f"{release}.0"
    assert pinned("").keys() == pinned(OLDEST).keys()


def test_the_pins_of_the_installed_line_are_what_flower_asks_for():
    release = importlib.metadata.version("flwr")
    if release not in (f"{OLDEST}.0", f"{NEWEST}.0"):
        pytest.skip(f"flwr {release} has no pins")
    pins = pinned(release)
    for asked in map(Requirement, importlib.metadata.requires("flwr") or []):
        if asked.marker is None or asked.marker.evaluate({"extra": "simulation"}):
            pin = pins.get(canonicalize_name(asked.name))
            assert pin is None or asked.specifier.contains(pin), f"{asked} does not allow {pin}"


def pinned(line: str) -> dict[str, str]:
    """Return the pins of a line of Flower, as `make install` and docker/ have them."""
    command = ["sh", "docker/pins.sh", line]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    pairs = [line.split("==") for line in done.stdout.splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.slow
def test_every_import_is_a_declared_dependency():
    extras = set(PROJECT["project"]["optional-dependencies"]) - {"dev"}
    declared = {canonicalize_name(one.name) for one in requirements(*extras)}
    belongs_to = importlib.metadata.packages_distributions()
    for package in sorted(OWN):
        for path in (ROOT / package).rglob("*.py"):
            if TEMPLATE in path.parents:
                continue  # of another project
            for module in imported(path) - OWN - set(sys.stdlib_module_names):
                owners = {canonicalize_name(name) for name in belongs_to.get(module, [module])}
                assert owners & declared, f"{path} imports {module}, which is not declared"


def test_the_bundle_holds_the_code_and_the_recipes_and_nothing_else():
    files = sources()
    bundle, _ = build_fab_from_files(files)
    names = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
    wanted = {
        path
        for path in files
        if path.startswith(tuple(f"{package}/" for package in PACKAGES))
        and path.endswith((".py", ".yaml", ".json") if path.startswith("conf/") else ".py")
    } | {"fedhet/__init__.py", "fedhet/public_names.py"}
    wanted |= {name for name in files if re.fullmatch(r"reproductions/\w+/conf/.+\.yaml", name)}
    assert {path.relative_to(ROOT).as_posix() for path in experiment_files().values()} <= wanted
    assert {"server_app/app.py", "client_app/app.py", "conf/config.yaml"} <= wanted
    assert names == wanted | {"pyproject.toml", ".info/CONTENT"}
    assert "federations" not in PROJECT["tool"]["flwr"]  # Flower would move them away


@pytest.mark.slow
def test_every_key_of_the_run_config_is_a_key_of_the_recipe():
    keys = flat(PROJECT["tool"]["flwr"]["app"]["config"]).keys()
    partitions = {"partition.alpha": "dirichlet", "partition.classes": "pathological"}
    for key in keys - {"overrides"}:
        recipe = compose({"partition": partitions[key]} if key in partitions else {})
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(recipe, parent) if parent else recipe
        assert name in node, f"{key} is in pyproject.toml, and the recipe has no such key"


def test_no_file_names_a_package_registry():
    for name, path in sources().items():
        if path.suffix in {"", ".py", ".toml", ".txt", ".md", ".yaml", ".yml", ".sh"}:
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [host for host in HOSTS if host in text], name
