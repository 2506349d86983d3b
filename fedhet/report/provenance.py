"""What went wrong, what was run, and on what: runs, commands, machines, versions and code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedhet.common.results import COMPLETED, DIVERGED, FAILED, ROUNDS_WITHOUT_ROWS, STOPPED
from fedhet.report.blocks import Block, Heading, Listing, Paragraph, Table
from fedhet.report.data_file import ReportData
from fedhet.report.names import listed, method_title
from fedhet.report.run_data import DISTRUST, RUNNING, UNFINISHED, Run, score_of

_DISTRUST = dict(zip(DISTRUST, ("left out", "counted less than half", "stood out"), strict=True))
_MOST = 8  # clients of an entry
PARTS = ("What went wrong", "What was run", "Environment")
UNKNOWN = "not recorded"
_INCOMPLETE = {
    FAILED: "failed",
    DIVERGED: "diverged",
    STOPPED: "stopped before the end",
    UNFINISHED: "unfinished or unreadable",
    RUNNING: "still running",
}
_MACHINE = {
    "cpu": "CPU",
    "cores": "cores",
    "memory_gb": "memory (GB)",
    "gpu": "GPU",
    "system": "system",
    "python": "Python",
}


def warnings(data: ReportData) -> list[Block]:
    """Return warnings about failed runs, refused replies, and different code or versions."""
    texts = []
    for status, what in _INCOMPLETE.items():
        if names := [run.name for run in data.runs if run.status == status]:
            kept = "No mean includes them" if len(names) > 1 else "No mean includes it"
            text = f"{len(names)} of {len(data.runs)} runs {what}: {listed(names)}. {kept}"
            texts.append(f"{text}." if status == RUNNING else f"{text}; see {PARTS[0]}.")
    if theirs := [run.name for run in data.runs if run.at_clients]:
        texts.append(
            f"Accuracy and loss of {listed(theirs)} are those that clients measured, on what they "
            "hold out or else on what they train on: the server has no test examples."
        )
    own = [run.name for run in data.runs if run.settings.get("evaluation.model") == "clients"]
    if own and len(own) < len(data.runs):
        texts.append(
            f"Accuracy and loss of {listed(own)} are the mean of the clients' own models "
            "(evaluation.model=clients) on the data that the others' global model is measured on; "
            "on each client's own data they are personal_accuracy."
        )
    if early := [run for run in data.runs if run.summary.get("stop_reason")]:
        rounds = [f"{run.name} after round {run.summary.get('rounds')}" for run in early]
        texts.append(
            f"{len(early)} of {len(data.runs)} runs ended before their last round, by "
            f"early_stopping or target_accuracy: {listed(rounds)}."
        )
    if lost := [run for run in data.runs if run.summary.get(ROUNDS_WITHOUT_ROWS)]:
        rounds = [f"{run.name} of {run.summary[ROUNDS_WITHOUT_ROWS]} rounds" for run in lost]
        texts.append(
            f"metrics.jsonl was lost before a resumption, and lacks rows: {listed(rounds)}. The "
            "best value is unknown, and what it took to reach a target; the totals of bytes and "
            "seconds are of the other rounds."
        )
    if jobs := [text for origin in data.origins for text in origin.failures]:
        texts.append(f"Jobs of the sweep without results: {'; '.join(jobs)}")
    texts += [origin.unfinished for origin in data.origins if origin.unfinished]
    versions = _versions(data.runs)
    for name in [name for name in versions if versions[name].nunique() > 1]:
        found = versions.groupby(name, sort=False).groups
        parts = [f"{value} ({_named(data.runs, rows)})" for value, rows in found.items()]
        whose = "fedhet's or that of your own packages (recipes may name different ones)"
        code = f"The code of the runs differs, {whose}"
        what = code if name == "code" else f"The runs used different versions of {name}"
        texts.append(f"{what}: {'; '.join(parts)}.")
    if count := sum(int(run.summary.get("failures") or 0) for run in data.runs):
        texts.append(f"{count} replies of clients were refused or missing: see {PARTS[0]}.")
    return [Paragraph(text, warning=True) for text in texts]


def provenance(data: ReportData) -> list[Block]:
    """Return the last part of the page: troubles, every run, and its environment."""
    commands = [origin.command for origin in data.origins if origin.command]
    machines = pd.DataFrame(
        {
            title: str((run.summary.get("machine") or {}).get(key, UNKNOWN))
            for key, title in _MACHINE.items()
        }
        for run in data.runs
    )
    where = "The machine of the server and, in a simulation, of all clients."
    code = "Versions, and the fingerprint of the code, with your own packages that a recipe names."
    return [
        *_troubles(data.runs),
        Heading(2, PARTS[1]),
        *([Listing(commands, "code")] if commands else []),
        _runs_table(data.runs),
        Heading(2, PARTS[2]),
        _grouped_table(data.runs, machines, where),
        _grouped_table(data.runs, _versions(data.runs), code),
    ]


def _runs_table(runs: Sequence[Run]) -> Table:
    caption = (
        "Seconds: wall time of the run, since its last resumption. Failures: replies that were "
        "refused or missing. MB: up and down. Recipe: its fingerprint, which differs by seed."
    )
    score, unit, form, scale = "accuracy", " (%)", ".2f", 100
    if score_of(runs) == "loss":
        score, unit, form, scale = "loss", " loss", ".4g", 1
    rows = []
    for run in runs:
        summary, values = run.summary, [value for _, value in run.points(score)]
        sent = [summary[key] for key in ("bytes_up", "bytes_down") if summary.get(key) is not None]
        best = (max if score == "accuracy" else min)(values, default=None)
        row = {
            **{"run": run.name, "method": method_title(run.method), "seed": _format(run.seed, "")},
            "status": run.status,
            "rounds": _format(summary.get("rounds"), "d"),
            f"final{unit}": _format(values[-1] if values else None, form, scale),
            f"best{unit}": _format(best, form, scale),
            "failures": _format(summary.get("failures"), "d"),
            "seconds": _format(summary.get("wall_seconds"), ".1f"),
            "s/round": _format(summary.get("seconds_per_round"), ".3g"),
            "MB": f"{sum(sent) / 1e6:.1f}" if len(sent) == 2 else "-",
            "recipe": _fingerprint(run, "recipe"),
        }
        rows.append(row)
    return Table(pd.DataFrame(rows), caption, words=4)


def _format(value: Any, form: str, scale: float = 1) -> str:
    return "-" if value is None else format(value * scale, form)


def _troubles(runs: Sequence[Run]) -> list[Block]:
    rows = [(run.name, run.status, run.error) for run in runs if run.error]
    rows += [(run.name, run.status, text) for run in runs for text in run.refusals]
    silent = [run for run in runs if run.status not in (COMPLETED, RUNNING) and not run.error]
    rows += [(run.name, run.status, "-") for run in silent]
    frame = pd.DataFrame(rows, columns=["run", "status", "reason"])
    return [Heading(2, PARTS[0]), Table(frame, words=3)] if rows else []


def _versions(runs: Sequence[Run]) -> pd.DataFrame:
    """Return the versions of runs that have a summary, by the runs' numbers."""
    known = {number: run for number, run in enumerate(runs) if run.summary.get("versions")}
    names = dict.fromkeys(name for run in known.values() for name in run.summary["versions"])
    rows = [
        {name: str(run.summary["versions"].get(name, UNKNOWN)) for name in names}
        | {"code": _fingerprint(run, "code")}
        for run in known.values()
    ]
    return pd.DataFrame(rows, index=list(known))


def _grouped_table(runs: Sequence[Run], frame: pd.DataFrame, caption: str) -> Table:
    """Return a row for each group of runs that are equal in all columns."""
    columns = list(frame.columns)
    groups = frame.groupby(columns, sort=False).groups.values() if columns else []
    rows = [[_named(runs, numbers), *frame.loc[numbers[0]]] for numbers in groups]
    named = pd.DataFrame(rows, columns=["runs", *columns])
    return Table(named, caption, words=named.shape[1])


def _named(runs: Sequence[Run], numbers: Any) -> str:
    first = runs[numbers[0]].name
    return first if len(numbers) == 1 else f"{first} and {len(numbers) - 1} more"


def _fingerprint(run: Run, kind: str) -> str:
    found: Mapping[str, Any] = run.summary.get("fingerprint") or {}
    return str(found.get(kind, "-"))[:8]


def distrusted(runs: Sequence[Run]) -> list[Block]:
    """Return the table, if a run has such clients."""
    shown = [run for run in runs if run.distrusted]
    if not shown:
        return []
    frame = pd.DataFrame(
        {"run": run.name}
        | {title: _entry(run.distrusted.get(column, {})) for column, title in _DISTRUST.items()}
        for run in shown
    )
    caption = (
        "Clients, and in how many rounds. Honest clients are among them: a robust aggregator "
        "leaves out who differs, and Krum all but one."
    )
    return [Heading(3, "Distrusted clients"), Table(frame, caption, words=4)]


def _entry(counts: Mapping[str, int]) -> str:
    named = [f"{client} ({rounds})" for client, rounds in counts.items()]
    more = f" and {len(named) - _MOST} more" if len(named) > _MOST else ""
    return ", ".join(named[:_MOST]) + more if named else "-"
