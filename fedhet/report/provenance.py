"""What the numbers depend on beside the recipe: versions, code, machine, and what went wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedhet.report.blocks import Block, Entry, Heading, Listing, Paragraph, Table, Warn
from fedhet.report.data_file import ReportData
from fedhet.report.run_data import COMPLETED, FAILED, UNFINISHED, Run

PARTS = ("Runs", "Environment")
UNKNOWN = "not recorded"
MACHINE = {
    "cpu": "CPU",
    "cores": "cores",
    "memory_gb": "memory (GB)",
    "gpu": "GPU",
    "system": "system",
    "python": "Python",
}


def warnings(data: ReportData) -> list[Block]:
    """Return what a reader must not miss about the runs as a whole."""
    found: list[Block] = []
    for status, what in ((FAILED, "failed"), (UNFINISHED, "unfinished or unreadable")):
        names = [run.name for run in data.runs if run.status == status]
        if names:
            text = f"{len(names)} of {len(data.runs)} runs {what}: {', '.join(names)}."
            found.append(Warn(f"{text} No mean includes them; the reasons are under Runs."))
    jobs = [text for origin in data.origins for text in origin.failures]
    if jobs:
        found.append(Warn(f"Jobs of the sweep that have left no results: {'; '.join(jobs)}"))
    codes = _values(data.runs, lambda run: _fingerprint(run, "code"))
    if len(codes) > 1:
        parts = "; ".join(f"{code}: {_names(runs)}" for code, runs in codes.items())
        found.append(Warn(f"The runs are not of one version of the code. {parts}."))
    for package, versions in _differing_versions(data.runs).items():
        found.append(Warn(f"The runs used different versions of {package}: {versions}."))
    refused = [run for run in data.runs if run.summary.get("failures")]
    if refused:
        count = sum(int(run.summary["failures"]) for run in refused)
        found.append(Warn(f"{count} replies of clients were refused or missing: see Runs."))
    return found


def surroundings(data: ReportData) -> list[Block]:
    """Return the page's last part: every run, and what it ran on."""
    return [
        Heading(2, PARTS[0]),
        _runs_table(data.runs),
        *_troubles(data.runs),
        Heading(2, PARTS[1]),
        *_machines(data.runs),
        *_versions(data.runs),
    ]


def _runs_table(runs: Sequence[Run]) -> Table:
    heads = ["run", "method", "seed", "status", "rounds", "final (%)", "best (%)"]
    heads += ["failures", "seconds", "s/round", "MB", "recipe"]
    return Table(
        heads,
        [_run_row(run) for run in runs],
        "Seconds: wall time of the run (after a resumption, since then). Failures: replies that "
        "were refused or missing. MB: up and down. Recipe: its fingerprint, another each seed.",
        words=4,
    )


def _run_row(run: Run) -> list[Entry]:
    summary = run.summary
    return [
        Entry(run.name),
        Entry(run.method),
        Entry("-" if run.seed is None else str(run.seed)),
        Entry(run.status),
        Entry(_format(summary.get("rounds"), "d")),
        Entry(_format(summary.get("accuracy"), ".2f", 100)),
        Entry(_format(summary.get("best_accuracy"), ".2f", 100)),
        Entry(_format(summary.get("failures"), "d")),
        Entry(_format(summary.get("wall_seconds"), ".1f")),
        Entry(_format(summary.get("seconds_per_round"), ".3g")),
        Entry(_megabytes(summary)),
        Entry(_fingerprint(run, "recipe")),
    ]


def _megabytes(summary: Mapping[str, Any]) -> str:
    sent = [summary[key] for key in ("bytes_up", "bytes_down") if summary.get(key) is not None]
    return f"{sum(sent) / 1e6:.1f}" if len(sent) == 2 else "-"


def _format(value: Any, form: str, scale: float = 1) -> str:
    return "-" if value is None else format(value * scale, form)


def _troubles(runs: Sequence[Run]) -> list[Block]:
    lines = [f"{r.name}: {r.status}: {r.error}" for r in runs if r.status != COMPLETED]
    lines += [f"{r.name}: {r.error}" for r in runs if r.status == COMPLETED and r.error]
    lines += [f"{run.name}: {text}" for run in runs for text in run.refusals]
    if not lines:
        return []
    return [Paragraph("What went wrong:"), Listing(lines)]


def _machines(runs: Sequence[Run]) -> list[Block]:
    rows = []
    for machine, members in _values(runs, _machine).items():
        rows.append([Entry(_names(members)), *(Entry(part) for part in machine)])
    heads = ["runs", *MACHINE.values()]
    caption = "The machine of the server and, in a simulation, of all clients."
    return [Table(heads, rows, caption, words=len(heads))]


def _machine(run: Run) -> tuple[str, ...]:
    machine = run.summary.get("machine") or {}
    return tuple(str(machine.get(key, UNKNOWN)) for key in MACHINE)


def _versions(runs: Sequence[Run]) -> list[Block]:
    names = dict.fromkeys(name for run in runs for name in run.summary.get("versions", {}))
    rows = []
    found = _values(
        runs, lambda run: (*(_version(run, name) for name in names), _fingerprint(run, "code"))
    )
    for versions, members in found.items():
        rows.append([Entry(_names(members)), *(Entry(version) for version in versions)])
    heads = ["runs", *names, "code"]
    return [Table(heads, rows, "Versions, and the fingerprint of our code.", words=len(heads))]


def _version(run: Run, name: str) -> str:
    return str(run.summary.get("versions", {}).get(name, UNKNOWN))


def _differing_versions(runs: Sequence[Run]) -> Mapping[str, str]:
    known = [run for run in runs if run.summary.get("versions")]
    names = dict.fromkeys(name for run in known for name in run.summary["versions"])
    found = {name: dict.fromkeys(_version(run, name) for run in known) for name in names}
    return {name: ", ".join(versions) for name, versions in found.items() if len(versions) > 1}


def _fingerprint(run: Run, kind: str) -> str:
    return str((run.summary.get("fingerprint") or {}).get(kind, "-"))[:8]


def _values(runs: Sequence[Run], of: Any) -> dict[Any, list[Run]]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        if run.summary:
            groups.setdefault(of(run), []).append(run)
    return groups


def _names(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return runs[0].name
    return f"{runs[0].name} and {len(runs) - 1} more"
