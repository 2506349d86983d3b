"""The page of the library's public names, which mkdocstrings fills with their docstrings."""

from __future__ import annotations

import fedhet

_FRAME = """# Library

Everything here is imported from `fedhet`: `from fedhet import FedPVR, make_client_app`. A
strategy is a Flower strategy: pass it to [`make_server_app`](own.md), or call its
`start(grid, arrays)`. Each takes the method's own parameters by name, and `options` and `setup`,
which [Method](#fedhet.strategies.method.Method) describes.
"""
_STRATEGIES = "fedhet.strategies."


def api_page() -> str:
    """Return the page."""
    public = {name: getattr(fedhet, name).__module__ for name in fedhet.__all__}
    others = [name for name, where in public.items() if not where.startswith(_STRATEGIES)]
    methods = [name for name, where in public.items() if where.startswith(_STRATEGIES)]
    sections = [_FRAME, "## Runs, apps and errors\n"]
    sections += [_entry(name, public[name]) for name in sorted(others, key=str.lower)]
    sections.append("## Strategies\n")
    sections += [_entry(name, public[name]) for name in sorted(methods, key=str.lower)]
    return "\n".join(sections)


def _entry(name: str, module: str) -> str:
    return f"::: {module}.{name}\n"
