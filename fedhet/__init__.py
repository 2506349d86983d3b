"""Federated learning when clients' data differ: methods as Flower strategies and clients.

In a Flower app of your own: :func:`make_client_app` and :func:`make_server_app` of your model, your
data and one of the methods (docs/own.md). The command ``fedhet`` runs recipes, and so does
:func:`run`, for notebooks. public_names.py lists the public names; torch is imported when one that
needs it is asked for.
"""

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from fedhet.public_names import *  # noqa: F403

_ROOT = Path(__file__).resolve().parent
if not (_ROOT / "strategies").is_dir():
    # Flower's app bundle has the packages beside this folder: it follows no link of a clone.
    __path__.append(str(_ROOT.parent))  # noqa: F405


def _public_names() -> dict[str, list[str]]:
    """Return the public names of each module, without importing one.

    A stub, which lazy_loader could read itself, does not travel in Flower's app bundles.
    """
    found: dict[str, list[str]] = {}
    for node in ast.parse((_ROOT / "public_names.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.removeprefix("fedhet.")
            found.setdefault(module, []).extend(alias.name for alias in node.names)
    return found


__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, submod_attrs=_public_names())
