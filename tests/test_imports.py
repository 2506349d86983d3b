"""The arrows of the design: who may import whom."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RECIPE = {"common", "conf", "strategies", "tasks"}
COMMAND = {*RECIPE, "client_app", "server_app", "fedhet"}
MAY_IMPORT = {
    "common": {"common"},
    "conf": {"conf", "strategies", "common"},  # build.py alone imports strategies
    "tasks": {"tasks", "common"},
    "strategies": {"strategies", "common"},
    "client_app": {"client_app", *RECIPE},
    "server_app": {"server_app", *RECIPE},
    "fedhet": COMMAND,
    "reproductions": {"reproductions", *COMMAND},
}
PACKAGES = MAY_IMPORT.keys() - {"fedhet"}
OURS = {*MAY_IMPORT, "docs", "benchmarks", "tests"}
NEVER = {
    "common": {"torch", "flwr", "hydra", "omegaconf"},
    "strategies": {"hydra", "omegaconf"},
    "tasks": {"flwr", "hydra", "omegaconf"},
}


INSIDE = ROOT / "common" / "flower"  # of Flower


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Return a file's imports and constants: several tests read the same files."""
    kinds = (ast.Import, ast.ImportFrom, ast.Constant)
    walked = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in walked if isinstance(node, kinds)]


def imported(path: Path) -> set[str]:
    """Return the packages that a file imports, wherever in it; ours without ``fedhet.``."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            module = node.module or ""
            inside = [f"{module}.{alias.name}" for alias in node.names]
            names = inside if module == "fedhet" else [module]
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            assert first not in PACKAGES, f"{path}: {name} is another module than fedhet.{name}"
            second = rest.partition(".")[0]
            found.add(second if first == "fedhet" and second in PACKAGES else first)
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_arrows_run_one_way(package):
    files = sorted((ROOT / package).rglob("*.py"))  # follows no link
    assert files
    for path in files:
        names = imported(path)
        assert names & OURS <= MAY_IMPORT[package], path
        never = NEVER.get(package, set()) - ({"flwr"} if path.parent == INSIDE else set())
        never -= {"torch"} if path.name == "fork_executor.py" else set()  # in another process
        assert not names & never, path


# ---- inside strategies/ --------------------------------------------------------------------------

# A room imports itself and those before it; every other file of strategies/ is a paper's.
ROOMS = ["base", "slots", "wire", "round", "components", "modes"]
ROOMS += [
    "parts",
    "compatibility",
    "federated",
    "method",
    "statistics",
    "fusion",
    "attacks",
    "papers",
]


def room_of(module: str) -> str:
    name = module.removeprefix("fedhet.strategies.").partition(".")[0]
    return name if name in ROOMS else "papers"


def rooms_imported(path: Path) -> set[str]:
    """Return the rooms that a file of strategies/ imports, wherever in it."""
    found = set()
    for node in nodes_of(path):
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        if node.module == "fedhet.strategies":
            found |= {room_of(alias.name) for alias in node.names}
        elif node.module.startswith("fedhet.strategies."):
            found.add(room_of(node.module))
    return found


def test_the_rooms_of_strategies_are_in_one_line():
    """wire <- round <- modes, so that there is no circle between them."""
    strategies = ROOT / "strategies"
    for path in sorted(strategies.rglob("*.py")):
        parts = path.relative_to(strategies).with_suffix("").parts
        if parts == ("__init__",):
            continue
        before = ROOMS[: ROOMS.index(room_of(parts[0])) + 1]
        assert rooms_imported(path) <= {*before}, path


def test_no_two_packages_import_each_other():
    strategies = ROOT / "strategies"
    packages = {path.parent for path in strategies.rglob("__init__.py")} - {strategies}
    arrows = {
        (package.name, room)
        for package in packages
        if package.parent == strategies
        for path in package.rglob("*.py")
        for room in rooms_imported(path)
        if room != package.name
    }
    assert not {(one, other) for one, other in arrows if (other, one) in arrows}


# ---- Flower's inside -----------------------------------------------------------------------------

# What Flower documents for apps; of `flwr.common` also the logger, which its guide names.
PUBLIC = {"flwr", "flwr.app", "flwr.client", "flwr.clientapp", "flwr.clientapp.mod", "flwr.common"}
PUBLIC |= {"flwr.common.logger", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation"}


def of_flower(path: Path) -> set[str]:
    """Return Flower's modules that a file imports or names, and private names that it imports."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            private = [alias.name for alias in node.names if alias.name.startswith("_")]
            found |= {f"{node.module}.{name}" for name in private}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if " " not in node.value else set()
    return {one for one in found if one.partition(".")[0] == "flwr" and "." in one}


def test_only_one_folder_leans_on_flowers_inside():
    files = [
        path
        for top in (*OURS - {"tests"}, "docker", "examples")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]
    assert len(files) > 200
    inside = {path for path in files if of_flower(path) - PUBLIC}
    assert inside <= {*INSIDE.glob("*.py")}
    assert len(inside) > 5


def test_every_file_about_flowers_inside_names_a_test_that_exists():
    for path in sorted(INSIDE.glob("*.py")):
        if path.name == "__init__.py":
            continue
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert doc.startswith("Issue: "), path
        assert "Releases: 1." in doc, path
        named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", doc)
        assert named, path
        for file, test in named:
            assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8"), (path, test)
