"""docs/methods.md and the page of each method."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Sequence
from pathlib import Path

from docs.generator.markdown import escape, table, to_markdown
from docs.generator.measure import TASK, Cost, Sizes
from docs.generator.measured import measured
from docs.generator.recipes import ROOT, DocumentedMethod, DocumentedPart
from fedhet.strategies.wire.records import PARAMS, UPDATE

METHODS = ROOT / "docs" / "methods"  # where the pages are in the site
BESIDE = Path(__file__).with_name("beside.json")  # by method, outside code that it was run beside
_TEMPLATE = Path(__file__).parent / "notes" / "methods.md"


def index(methods: Sequence[DocumentedMethod]) -> str:
    """Return docs/methods.md: the hand-written frame with the two tables in it."""
    what = table(
        ["method", "what it is for", "paper", "client half", "server half", "replaces", "payloads"],
        [
            [
                f"[{method.name}](methods/{method.id}.md)",
                escape(method.summary[:1].upper() + method.summary[1:]),
                f"[{method.paper}]({method.url})" if method.url else method.paper,
                _hooks(method.parts, "client half"),
                _hooks(method.parts, "server half"),
                _replaced(method),
                _payloads(method.cost),
            ]
            for method in methods
        ],
    )
    beside = json.loads(BESIDE.read_text(encoding="utf-8"))
    costs = table(
        [
            *("method", "file", "lines", "sent", "kept by a client", "kept by the server"),
            *("outside code", "largest difference"),
        ],
        [
            [
                f"[{method.name}](methods/{method.id}.md)",
                f"`{method.module.relative_to(ROOT).as_posix()}`",
                str(method.module.read_text(encoding="utf-8").count("\n")),
                f"{method.cost.traffic:.3g}",
                _sizes(method.cost.client_state),
                _sizes(method.cost.server_state),
                *(beside.get(method.id, {}).get(key, "") for key in ("code", "difference")),
            ]
            for method in methods
        ],
    )
    frame = _TEMPLATE.relative_to(ROOT).as_posix()
    text = _TEMPLATE.read_text(encoding="utf-8").replace("<!-- task -->", TASK)
    both = f"{what}\n\nWhat each takes in code and in a round:\n\n{costs}"
    text = text.replace("<!-- table -->", both)
    return f"<!-- Made from {frame} and strategies/. -->\n{text}"


def method_page(method: DocumentedMethod) -> str:
    """Return a method's page."""
    sections = [_head(method), method.notes, measured(method.id), _options(method)]
    sections += [_cost(method.cost), _running(method), _parts(method), _body(method)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _hooks(parts: Sequence[DocumentedPart], role: str) -> str:
    return ", ".join(f"`{hook}`" for part in parts if part.role == role for hook in part.hooks)


def _replaced(method: DocumentedMethod) -> str:
    """Return what stands in a slot instead of FedAvg's part, or with other settings."""
    found = [part for part in method.parts if not part.role.endswith("half")]
    return "; ".join(f"{part.role} `{part.name}`" for part in found)


def _payloads(cost: Cost) -> str:
    down = [f"↓ `{name}`" for name in cost.down if name != PARAMS]
    up = [f"↑ `{name}`" for name in cost.up if name != UPDATE]
    return "<br>".join([*down, *up])


def _link(path: Path, text: str = "") -> str:
    where = os.path.relpath(path, METHODS).replace(os.sep, "/")
    return f"[{text or path.relative_to(ROOT).as_posix()}]({where})"


def _head(method: DocumentedMethod) -> str:
    made_of = method.module.relative_to(ROOT).as_posix()
    summary = method.summary if method.is_alone else f"{method.paper}: {method.summary}"
    return (
        f"<!-- Made from {made_of}. Edit that. -->\n"
        f"# {method.name}\n\n"
        f"{escape(summary[:1].upper() + summary[1:])}\n\n"
        f"`strategy={method.id}` · {_link(method.module)} · [all methods](../methods.md)"
    )


def _body(method: DocumentedMethod) -> str:
    if not method.docstring:
        return ""
    title, _, rest = inspect.cleandoc(method.docstring).partition("\n")
    if not method.is_alone:
        return f"## Details\n\n{to_markdown(method.docstring)}"
    title = (title.partition(": ")[2] or title).rstrip(".")
    return f"## Details\n\n**{escape(title[:1].upper() + title[1:])}.**\n{to_markdown(rest)}"


def _parts(method: DocumentedMethod) -> str:
    rows = []
    for part in method.parts:
        hooks = f" ({', '.join(f'`{hook}`' for hook in part.hooks)})" if part.hooks else ""
        rows.append([part.role + hooks, _link(part.path, f"`{part.name}`"), escape(part.says)])
    if not rows:
        return ""
    says = "" if method.id == "fedavg" else "Everything else is as in [FedAvg](fedavg.md)."
    return f"## Parts\n\n{table(['part', 'class', 'what it does'], rows)}\n\n{says}".rstrip()


def _options(method: DocumentedMethod) -> str:
    rows = [
        [f"`{one.key}`", f"`{one.default}`", escape(one.allowed), escape(one.meaning)]
        for one in method.options
    ]
    sections = [table(["key", "default", "allowed", "meaning"], rows)] if rows else []
    if method.settings:
        changed = ", ".join(f"`{key}={value}`" for key, value in method.settings.items())
        sections.append(f"It changes these defaults, which you may set otherwise: {changed}.")
    return "\n\n".join(["## Keys", *sections]) if sections else ""


def _running(method: DocumentedMethod) -> str:
    lines = [f"fedhet strategy={method.id} task=cifar10 partition.alpha=0.1"]
    plain = [option for option in method.options if "$" not in option.default][:1]
    lines += [f"fedhet strategy={method.id} {o.key}={o.default}" for o in plain]
    text = "## Running it\n\n```\n" + "\n".join(lines) + "\n```"
    name, file = method.kind.__name__, _link(method.module)
    return f"{text}\n\nIn a Flower app it is the strategy `fedhet.{name}` of {file}."


def _cost(cost: Cost) -> str:
    rows = [
        ["down", _sizes(cost.down)],
        ["up", _sizes(cost.up)],
        ["sent in all", f"{cost.traffic:.3g}"],
        ["kept by a client", _sizes(cost.client_state)],
        ["kept by the server", _sizes(cost.server_state)],
    ]
    how = f"Of a round, counted on {TASK}; sizes in models (see [how](../methods.md))."
    return f"## What travels\n\n{how}\n\n{table(['what', 'size'], rows)}"


def _sizes(shares: Sizes) -> str:
    return ", ".join(f"`{name}` {share:.3g}" for name, share in shares.items()) or "nothing"
