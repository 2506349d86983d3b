"""Write docs/methods.md, docs/methods/, docs/experiments.md: ``python -m docs.generator``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from docs.generator import tables
from docs.generator.facts import Method, Part, all_methods
from docs.generator.measure import TASK, Cost
from docs.generator.page import FOLDER, page, passes, sizes, table, times
from docs.generator.recipes import ROOT
from strategies.round.records import PARAMS, UPDATE

_INDEX = ROOT / "docs" / "methods.md"
_TEMPLATE = Path(__file__).parent / "notes" / "methods.md"


def pages() -> dict[Path, str]:
    """Return every page by its file."""
    methods = all_methods()
    written = {FOLDER / f"{method.recipe.method}.md": page(method, methods) for method in methods}
    return written | {_INDEX: index(methods), tables.PAGE: tables.experiments_page()}


def index(methods: Sequence[Method]) -> str:
    """Return docs/methods.md: the hand-written frame with the two tables in it."""
    text = _TEMPLATE.read_text(encoding="utf-8")
    text = text.replace("<!-- task -->", TASK).replace("<!-- table -->", _tables(methods))
    frame = _TEMPLATE.relative_to(ROOT).as_posix()
    return f"<!-- Made by `make docs` from {frame}, conf/strategy, code and tests. -->\n{text}"


def _tables(methods: Sequence[Method]) -> str:
    what = table(
        ["method", "paper", "client half", "server half", "replaces", "payloads"],
        [_what(method) for method in methods],
    )
    costs = table(
        ["method", "sent", "kept by a client", "kept by the server", "passes", "checks"],
        [_costs(method) for method in methods],
    )
    return f"{what}\n\nWhat a round of each takes, and where it was checked:\n\n{costs}"


def _what(method: Method) -> list[str]:
    recipe, cost = method.recipe, method.cost
    paper = f"[{recipe.paper}]({method.url})" if method.url else recipe.paper
    return [
        f"[{recipe.name}](methods/{recipe.method}.md)",
        paper,
        _hooks(method.parts, "client half"),
        _hooks(method.parts, "server half"),
        _replaced(method),
        _payloads(cost),
    ]


def _hooks(parts: Sequence[Part], role: str) -> str:
    return ", ".join(f"`{hook}`" for part in parts if part.role == role for hook in part.hooks)


def _replaced(method: Method) -> str:
    """Return what is in a slot instead of FedAvg's part."""
    if method.recipe == method.base:
        return ""
    found = [part for part in method.parts if not part.role.endswith("half")]
    return "; ".join(f"{part.role} `{part.name}{part.settings}`" for part in found)


def _payloads(cost: Cost) -> str:
    down = [f"↓ `{name}`" for name in cost.down if name != PARAMS]
    up = [f"↑ `{name}`" for name in cost.up if name != UPDATE]
    return "<br>".join([*down, *up])


def _costs(method: Method) -> list[str]:
    cost, recipe = method.cost, method.recipe
    return [
        f"[{recipe.name}](methods/{recipe.method}.md)",
        times(cost.traffic),
        sizes(cost.client_state),
        times(sum(cost.server_state.values())),
        passes(cost),
        f"[{len(method.checks)} tests](methods/{recipe.method}.md#checked-by)",
    ]


def main() -> None:
    """Write the pages, and remove those of methods that are gone."""
    written = pages()
    for path in set(FOLDER.glob("*.md")) - set(written):
        path.unlink()
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    count = sum(path.parent == FOLDER for path in written)
    print(f"{count} methods: {_INDEX.relative_to(ROOT)}, {FOLDER.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
