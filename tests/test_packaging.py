"""What is installed, what Flower bundles, and what the make targets and CI call."""

from __future__ import annotations

import ast
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_files
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conf import PACKAGES, compose
from fedhet.runtimes.flower_install import FLOWER

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OWN = {*PACKAGES, "fedhet", "reproductions"}
STANDARD = set(sys.stdlib_module_names)
TARGETS = ["help", "install", "run", "test", "check", "lint", "docs", "bench", "clean"]
# In parts, so that this file does not name what it forbids.
HOSTS = ["pypi" + ".org", "python" + "hosted", "download.py" + "torch", "registry." + "npmjs"]


def requirements(*extras: str) -> list[Requirement]:
    project = PROJECT["project"]
    words = [*project["dependencies"]]
    for extra in extras or project["optional-dependencies"]:
        words += project["optional-dependencies"][extra]
    return [Requirement(word) for word in words]


def sources() -> dict[str, Path]:
    """Return what a clone holds that Flower could bundle, by path."""
    found = {}
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in {".venv", ".git", "__pycache__"}]
        for name in files:
            path = Path(folder) / name
            found[path.relative_to(ROOT).as_posix()] = path
    return found


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (pin.split("==") for pin in pins)}


def test_uv_leaves_out_every_dependency() -> None:
    excluded = {canonicalize_name(name) for name in PROJECT["tool"]["uv"]["exclude-dependencies"]}
    assert excluded == {canonicalize_name(requirement.name) for requirement in requirements()}


@pytest.mark.flower  # a process of uv's, seconds
def test_the_sync_before_a_run_installs_nothing_and_needs_no_network(tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.mkdir()
    shutil.copy(ROOT / "pyproject.toml", app)
    environment = tmp_path / "environment"
    command = [sys.executable, "-m", "uv", "sync", "--python", sys.executable]
    # As flwr.supercore.superexec.dependency_installer calls it.
    command += ["--no-install-project", "--no-install-package", "flwr", "--inexact"]
    done = subprocess.run(
        command,
        cwd=app,
        env=os.environ
        | {
            "UV_OFFLINE": "1",
            "UV_CACHE_DIR": str(tmp_path / "cache"),
            "UV_PROJECT_ENVIRONMENT": str(environment),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not list(environment.rglob("*.dist-info"))


def test_constraints_pin_every_direct_dependency_within_its_range() -> None:
    pins = constraints()
    for requirement in requirements():
        pin = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), f"{requirement} does not allow {pin}"
        assert "+" not in pin


def test_the_environment_is_the_pinned_one_where_it_matters() -> None:
    if not (ROOT / ".venv" / ".installed").exists():
        pytest.skip("not the environment of `make install`")
    for name in ("flwr", "torch", "torchvision", "hydra-core"):
        installed = importlib.metadata.version(name).split("+")[0]
        assert installed == constraints()[name]


def test_flower_is_pinned_to_the_version_that_the_launcher_is_written_for() -> None:
    flwr = next(one for one in requirements() if one.name == "flwr")
    assert str(flwr.specifier) == f"=={FLOWER}.0"
    assert constraints()["flwr"] == f"{FLOWER}.0"


def test_every_import_is_a_declared_dependency() -> None:
    extras = ("fusion", "plots", "privacy", "sweep")
    declared = {canonicalize_name(one.name) for one in requirements(*extras)}
    belongs_to = importlib.metadata.packages_distributions()
    for package in sorted(OWN):
        for path in (ROOT / package).rglob("*.py"):
            for module in imported_modules(path) - OWN - STANDARD:
                owners = {canonicalize_name(name) for name in belongs_to.get(module, [module])}
                assert owners & declared, f"{path} imports {module}, which is not declared"


def imported_modules(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_the_bundle_holds_the_code_and_the_recipes_and_nothing_else() -> None:
    files = sources()
    bundle, _ = build_fab_from_files(files)
    names = set(zipfile.ZipFile(io.BytesIO(bundle)).namelist())
    wanted = {
        path
        for path in files
        if path.startswith(tuple(f"{package}/" for package in PACKAGES))
        and (path.endswith(".py") or (path.startswith("conf/") and path.endswith(".yaml")))
    }
    assert {"server_app/app.py", "client_app/app.py", "conf/config.yaml"} <= wanted
    assert names == wanted | {"pyproject.toml", ".info/CONTENT"}


def test_flower_finds_no_federations_to_move_out_of_pyproject() -> None:
    assert "federations" not in PROJECT["tool"]["flwr"]


def test_every_key_of_the_run_config_is_a_key_of_the_recipe() -> None:
    def keys(table: dict[str, object], prefix: str = "") -> list[str]:
        found = []
        for name, value in table.items():
            key = f"{prefix}{name}"
            found += keys(value, f"{key}.") if isinstance(value, dict) else [key]
        return found

    config = PROJECT["tool"]["flwr"]["app"]["config"]
    partitions = {"partition.alpha": "dirichlet", "partition.classes": "pathological"}
    for key in set(keys(config)) - {"overrides"}:
        recipe = compose({"partition": partitions[key]} if key in partitions else {})
        node = recipe
        for part in key.split("."):
            assert part in node, f"{key} is in pyproject.toml, and the recipe has no such key"
            node = node[part]


def test_no_file_names_a_package_registry() -> None:
    for name, path in sources().items():
        if (
            path.suffix in {".py", ".toml", ".txt", ".md", ".yaml", ".yml", ".sh"}
            or not path.suffix
        ):
            text = path.read_text(encoding="utf-8", errors="replace")
            assert not [host for host in HOSTS if host in text], name


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_the_target(target: str) -> None:
    dry = subprocess.run(
        ["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert dry.returncode == 0, dry.stderr
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^  make {target} ", listed, re.MULTILINE)


def test_ci_calls_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text(encoding="utf-8").rstrip().endswith("\nmake test")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")
