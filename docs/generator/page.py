"""A method's page."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

from docs.generator.checks import Test, matrix_of
from docs.generator.facts import Method, experiments_with, results_with
from docs.generator.measure import TASK, Cost, Sizes
from docs.generator.prose import cell, escape, to_markdown
from docs.generator.recipes import ROOT

FOLDER = ROOT / "docs" / "methods"


def page(method: Method, others: Sequence[Method]) -> str:
    """Return a method's page in Markdown.

    Args:
        method: the method.
        others: all methods.
    """
    sections = [
        _head(method),
        _body(method),
        _parts(method),
        _options(method),
        method.notes,
        _running(method),
        _combining(method, others),
        _cost(method),
        _checks(method),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def link(path: Path, text: str = "", start: Path = FOLDER) -> str:
    """Return a link to a file of the repository."""
    where = os.path.relpath(path, start).replace(os.sep, "/")
    return f"[{text or path.relative_to(ROOT).as_posix()}]({where})"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in lines)


def times(share: float) -> str:
    """Return a multiple to three digits."""
    return f"{share:.3g}"


# ---- sections ------------------------------------------------------------------------------------


def _head(method: Method) -> str:
    recipe = method.recipe
    sources = [path for path in (method.module, recipe.path) if path is not None]
    made_of = ", ".join(path.relative_to(ROOT).as_posix() for path in sources)
    files = ", ".join(link(path) for path in sources)
    summary = f"{recipe.paper}: {recipe.summary}" if not method.is_alone else recipe.summary
    return (
        f"<!-- Made by `make docs` from {made_of} and the tests. Edit those. -->\n"
        f"# {recipe.name}\n\n"
        f"{_upper(escape(summary))}\n\n"
        f"`strategy={recipe.method}` · {files} · [all methods](../methods.md)"
    )


def _body(method: Method) -> str:
    text = method.docstring
    if not text:
        return ""
    if not method.is_alone:
        assert method.module is not None
        return f"## The method\n\n{to_markdown(text)}"
    title, _, rest = inspect.cleandoc(text).partition("\n")
    name, colon, says = title.partition(": ")
    title = _upper(says) if colon else name
    return f"## The method\n\n**{escape(title.rstrip('.'))}.**\n{to_markdown(rest.strip())}"


def _parts(method: Method) -> str:
    rows = []
    for part in method.parts:
        hooks = f" ({', '.join(f'`{hook}`' for hook in part.hooks)})" if part.hooks else ""
        rows.append([part.role + hooks, link(part.path, f"`{part.name}`"), escape(part.says)])
    if not rows:
        return ""
    says = "Everything else is as in [FedAvg](fedavg.md)." if method.recipe != method.base else ""
    return f"## Parts\n\n{table(['part', 'class', ''], rows)}\n\n{says}".rstrip()


def _options(method: Method) -> str:
    if not method.recipe.options:
        return ""
    rows = [[f"`{o.key}`", f"`{o.default}`", escape(o.meaning)] for o in method.recipe.options]
    return f"## Options\n\n{table(['key', 'default', 'meaning'], rows)}"


def _running(method: Method) -> str:
    recipe = method.recipe
    lines = [f"fedhet strategy={recipe.method} task=cifar10 partition.alpha=0.1"]
    plain = [o for o in recipe.options if "$" not in o.default]
    if plain:
        lines.append(f"fedhet strategy={recipe.method} {plain[0].key}={plain[0].default}")
    text = "## Running it\n\n```\n" + "\n".join(lines) + "\n```"
    if method.strategy is not None:
        module = method.strategy.__module__
        text += (
            f"\n\nWithout the recipe it is a Flower strategy: `{method.call}` of "
            f"{link(ROOT / (module.replace('.', '/') + '.py'))}."
        )
    found = [link(path, name) for name, path in experiments_with(recipe.method).items()]
    if found:
        text += f"\n\nExperiments (`fedhet -m +experiment=NAME`): {', '.join(found)}."
    measured = ", ".join(link(path) for path in results_with(recipe.name))
    return text + (f"\n\nMeasured: {measured}." if measured else "")


def _combining(method: Method, others: Sequence[Method]) -> str:
    clashes = [
        (other, method.clash_with(other))
        for other in others
        if other.recipe.method not in (method.recipe.method, "fedavg")
    ]
    refused = [(other, why) for other, why in clashes if why]
    lines = ["## Combining", ""]
    if not refused:
        lines += ["It goes together with every other method."]
    else:
        lines += ["It goes together with every other method but:", ""]
        for why, group in groupby(sorted(refused, key=lambda one: one[1]), key=lambda one: one[1]):
            names = ", ".join(
                f"[{other.recipe.name}]({other.recipe.method}.md)" for other, _ in group
            )
            lines.append(f"- {names}: {why}.")
    together = [words for words in matrix_of(method.recipe.method) if "[" in words[0]]
    if together:
        tried = ", ".join(f"`{' '.join(words)}`" for words in together)
        lines += ["", f"Tested together: {tried}."]
    return "\n".join(lines)


def _cost(method: Method) -> str:
    costs = {"default": method.cost}
    costs |= {f"`{words}`": cost for words, cost in method.variants.items()}
    rows: dict[str, Callable[[Cost], str]] = {
        "down": lambda cost: sizes(cost.down),
        "up": lambda cost: sizes(cost.up),
        "sent in all": lambda cost: times(cost.traffic),
        "kept by a client": lambda cost: sizes(cost.client_state),
        "kept by the server": lambda cost: sizes(cost.server_state),
        "passes": passes,
    }
    cells = [[name, *(text(cost) for cost in costs.values())] for name, text in rows.items()]
    return (
        f"## Cost\n\nOf a round, counted on {TASK}; sizes in models (see [how](../methods.md)).\n\n"
        f"{table(['', *costs], cells)}"
    )


def sizes(shares: Sizes) -> str:
    """Return what travels or is kept, each with its size in models."""
    texts = [f"`{name.rpartition('/')[2]}` {times(share)}" for name, share in shares.items()]
    return ", ".join(texts) or "nothing"


def passes(cost: Cost) -> str:
    """Return the passes through the network per example and epoch."""
    return f"{times(cost.forward)} forward, {times(cost.backward)} back"


def _checks(method: Method) -> str:
    lines = ["## Checked by", ""]
    if not method.checks:
        lines.append("No test names it.")
    by_file = groupby(sorted(method.checks, key=lambda test: str(test.path)), lambda t: t.path)
    for path, tests in by_file:
        lines.append(f"- {link(path)}")
        lines += [f"  - {_check(test)}" for test in tests]
    recipes = ["`" + " ".join(words) + "`" for words in matrix_of(method.recipe.method)]
    if recipes:
        lines += ["", f"Recipes in the matrix: {', '.join(recipes)}."]
    return "\n".join(lines)


def _check(test: Test) -> str:
    return f"`{test.name}`" + (f": {escape(test.says, leading=False)}" if test.says else "")


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
