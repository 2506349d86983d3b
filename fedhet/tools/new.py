"""`fedhet-new my_project` writes a new project into the folder my_project.

It has a data set, a model, a method and a test. `fedhet`, `fedhet -m` and `flwr run .` work in it,
and its code travels with a run (docs/tutorial.md in a clone of fedhet).
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

import fedhet
from fedhet.commands import parser_of, reported_errors
from fedhet.common.errors import ConfigError
from fedhet.common.files import writable_folder

TEMPLATE = Path(fedhet.__file__).parent / "template"
_NAME, _APP_NAME = "my_project", "my-project"  # in the template; Flower wants no underscore
_SUFFIXES = (".py", ".yaml", ".toml", ".md")


def main() -> None:
    """Run the console command `fedhet-new`."""
    with reported_errors("fedhet-new"):
        parser = parser_of("fedhet-new", __doc__)
        parser.add_argument("name", metavar="NAME", help="name of the project and its package")
        name = str(parser.parse_args().name)
        check_name(name)
        files = write_project(Path.cwd() / name)
        print("\n".join(f"{name}/{file}" for file in files))
        print(f"Next: cd {name}, and read README.md")


def check_name(name: str) -> None:
    """Refuse a name that a package cannot have, or that an installed one has."""
    if not re.fullmatch(r"[a-z]([a-z0-9_]{,30}[a-z0-9])?", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name} is not a package name: use up to 32 small letters, digits and _, and begin "
            "with a letter"
        )
    if name in sys.builtin_module_names or _is_installed(name):
        raise ConfigError(f"{name} is the name of an installed package: choose another")
    if (Path(fedhet.conf.__path__[0]) / "task" / f"{name}.yaml").is_file():
        raise ConfigError(f"{name} is the name of one of fedhet's tasks: choose another")


def _is_installed(name: str) -> bool:
    """Return whether Python finds a module of this name outside the current folder."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:
        return True
    places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or [])]
    return any(place is not None and Path.cwd() / name != Path(place) for place in places)


def write_project(folder: Path) -> list[str]:
    """Write the template into a new folder, and return the files' names.

    Raises:
        ConfigError: if the folder exists, or cannot be made.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists: choose another name, or another folder to run this in")
    writable_folder(folder, "")
    written = []
    for path in sorted(TEMPLATE.rglob("*")):
        if path.suffix in _SUFFIXES:
            name = path.relative_to(TEMPLATE).as_posix().replace(_NAME, folder.name)
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8").replace(_NAME, folder.name)
            text = text.replace(_APP_NAME, folder.name.replace("_", "-"))
            place.write_text(text, encoding="utf-8")
            written.append(name)
    return written
