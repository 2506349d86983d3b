"""Lists the runs, their versions, code and machines, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedhet.common.results import COMPLETED, DIVERGED, FAILED, STOPPED
from fedhet.report.blocks import Block, Entry, Heading, Listing, Paragraph, Table, Warn
from fedhet.report.data_file import ReportData
from fedhet.report.run_data import UNFINISHED, Run

PARTS = ("Runs", "Environment")
UNKNOWN = "not recorded"
_INCOMPLETE = {
    FAILED: "failed",
    DIVERGED: "diverged",
    STOPPED: "were stopped",
    UNFINISHED: "unfinished or unreadable",
}
MACHINE = {
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
        names = [run.name for run in data.runs if run.status == status]
        if names:
            text = f"{len(names)} of {len(data.runs)} runs {what}: {', '.join(names)}."
            texts.append(f"{text} No mean includes them; the reasons are under Runs.")
    jobs = [text for origin in data.origins for text in origin.failures]
    if jobs:
        texts.append(f"Jobs of the sweep without results: {'; '.join(jobs)}")
    codes = _grouped(data.runs, lambda run: _fingerprint(run, "code"))
    if len(codes) > 1:
        parts = "; ".join(f"{code}: {_names(runs)}" for code, runs in codes.items())
        texts.append(f"The runs used different versions of the code. {parts}.")
    for package, versions in _differing_versions(data.runs).items():
        texts.append(f"The runs used different versions of {package}: {', '.join(versions)}.")
    if count := sum(int(run.summary.get("failures") or 0) for run in data.runs):
        texts.append(f"{count} replies of clients were refused or missing: see Runs.")
    return [Warn(text) for text in texts]


def provenance(data: ReportData) -> list[Block]:
    """Return the last part of the page: every run, and its environment."""
    runs = data.runs
    names = list(dict.fromkeys(name for run in runs for name in run.summary.get("versions", {})))
    versions = _grouped(
        runs, lambda run: (*(_version(run, name) for name in names), _fingerprint(run, "code"))
    )
    where = "The machine of the server and, in a simulation, of all clients."
    return [
        Heading(2, PARTS[0]),
        _runs_table(runs),
        *_troubles(runs),
        Heading(2, PARTS[1]),
        _environment(list(MACHINE.values()), _grouped(runs, _machine), where),
        _environment([*names, "code"], versions, "Versions, and the fingerprint of our code."),
    ]


def _runs_table(runs: Sequence[Run]) -> Table:
    heads = ["run", "method", "seed", "status", "rounds", "final (%)", "best (%)"]
    heads += ["failures", "seconds", "s/round", "MB", "recipe"]
    caption = (
        "Seconds: wall time of the run, since its last resumption. Failures: replies that were "
        "refused or missing. MB: up and down. Recipe: its fingerprint, which differs by seed."
    )
    return Table(heads, [_run_row(run) for run in runs], caption, words=4)


def _run_row(run: Run) -> list[Entry]:
    summary = run.summary
    sent = [summary[key] for key in ("bytes_up", "bytes_down") if summary.get(key) is not None]
    texts = [
        *(run.name, run.method, _format(run.seed, ""), run.status),
        _format(summary.get("rounds"), "d"),
        _format(summary.get("accuracy"), ".2f", 100),
        _format(summary.get("best_accuracy"), ".2f", 100),
        _format(summary.get("failures"), "d"),
        _format(summary.get("wall_seconds"), ".1f"),
        _format(summary.get("seconds_per_round"), ".3g"),
        f"{sum(sent) / 1e6:.1f}" if len(sent) == 2 else "-",
        _fingerprint(run, "recipe"),
    ]
    return [Entry(text) for text in texts]


def _format(value: Any, form: str, scale: float = 1) -> str:
    return "-" if value is None else format(value * scale, form)


def _troubles(runs: Sequence[Run]) -> list[Block]:
    lines = [f"{r.name}: {r.status}: {r.error}" for r in runs if r.status != COMPLETED]
    lines += [f"{r.name}: {r.error}" for r in runs if r.status == COMPLETED and r.error]
    lines += [f"{run.name}: {text}" for run in runs for text in run.refusals]
    return [Paragraph("What went wrong:"), Listing(lines)] if lines else []


def _environment(
    heads: Sequence[str], groups: Mapping[tuple[str, ...], Sequence[Run]], caption: str
) -> Table:
    rows = [[Entry(_names(runs)), *map(Entry, values)] for values, runs in groups.items()]
    return Table(["runs", *heads], rows, caption, words=len(heads) + 1)


def _machine(run: Run) -> tuple[str, ...]:
    machine = run.summary.get("machine") or {}
    return tuple(str(machine.get(key, UNKNOWN)) for key in MACHINE)


def _version(run: Run, name: str) -> str:
    return str(run.summary.get("versions", {}).get(name, UNKNOWN))


def _differing_versions(runs: Sequence[Run]) -> dict[str, list[str]]:
    known = [run for run in runs if run.summary.get("versions")]
    names = dict.fromkeys(name for run in known for name in run.summary["versions"])
    found = {name: list(dict.fromkeys(_version(run, name) for run in known)) for name in names}
    return {name: versions for name, versions in found.items() if len(versions) > 1}


def _fingerprint(run: Run, kind: str) -> str:
    return str((run.summary.get("fingerprint") or {}).get(kind, "-"))[:8]


def _grouped(runs: Sequence[Run], key: Callable[[Run], Any]) -> dict[Any, list[Run]]:
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        if run.summary:
            groups.setdefault(key(run), []).append(run)
    return groups


def _names(runs: Sequence[Run]) -> str:
    return runs[0].name if len(runs) == 1 else f"{runs[0].name} and {len(runs) - 1} more"
