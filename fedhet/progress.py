"""How a terminal, or a log, shows one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedhet.common.metrics import SHOWN_METRICS, shown_metrics
from fedhet.common.results import COMPLETED, Row


@contextmanager
def round_display(console: Console, title: str, rounds: int) -> Iterator[Callable[[Row], None]]:
    """Give a function that shows a finished round: in a progress bar on a terminal, else a line."""
    if console.is_terminal:
        first = SpinnerColumn(), "[bold]{task.description}", BarColumn(bar_width=24)
        last = "{task.fields[round]}", "{task.fields[figures]}", TimeElapsedColumn()
        with Progress(*first, *last, console=console) as bar:
            task = bar.add_task(title, total=rounds, round=f"round 0/{rounds}", figures="starting")
            latest: Row = {}

            def move(row: Row) -> None:
                latest.update({key: value for key, value in row.items() if value is not None})
                words = f"round {row['round']}/{rounds}"
                bar.update(task, completed=row["round"], round=words, figures=figures(latest))
                for failure in row.get("failures", ()):
                    console.print(Text(f"round {row['round']}: {failure}", style="yellow"))

            yield move
        return
    line = partial(console.print, markup=False, highlight=False, soft_wrap=True)

    def write(row: Row) -> None:
        words = f"round {row['round']:>3}/{rounds}"
        if any(row.get(name) is not None for name in _SHOWN) or row["round"] == rounds:
            line(f"{words}  {figures(row)}")
        for failure in row.get("failures", ()):
            line(f"{words}  {failure}")

    line(f"{title}: starting, {rounds} rounds to do")
    yield write


_SHOWN = ("accuracy", "client_accuracy")


def figures(row: Row) -> str:
    """Return a round's figures as text; what was not measured is left out."""
    # At the clients, where the server has no test examples.
    where = "" if any(row.get(name) is not None for name in ("accuracy", "loss")) else "client_"
    words = []
    if row.get(f"{where}accuracy") is not None:
        words.append(f"{_spoken(where)}accuracy {percent(row[f'{where}accuracy'])}")
    if row.get(f"{where}loss") is not None:
        words.append(f"{_spoken(where)}loss {row[f'{where}loss']:.4f}")
    metrics = list(shown_metrics(row).items())[:SHOWN_METRICS]
    words += [f"{name} {value:.4f}" for name, value in metrics]
    if row.get("seconds") is not None:
        words.append(f"{row['seconds']:.2f} s/round")
    return "  ".join(words)


def _spoken(where: str) -> str:
    return where.replace("_", " ")


def closing_panel(summary: Mapping[str, Any]) -> Panel:
    """Return the panel with the figures of a run that has ended."""
    status = summary.get("status")
    how, color = ("done", "green") if status == COMPLETED else (str(status), "yellow")
    seconds = f"{summary.get('seconds') or 0:.1f} s in rounds"
    if (per_round := summary.get("seconds_per_round")) is not None:
        seconds += f", {per_round:.2f} s each"
    up, down = ((summary.get(key) or 0) / 1e6 for key in ("bytes_up", "bytes_down"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    at_clients = summary.get("accuracy") is None and summary.get("client_accuracy") is not None
    where = "client_" if at_clients else ""
    accuracy = Text(percent(summary.get(f"{where}accuracy")), style=f"bold {color}")
    table.add_row(f"{_spoken(where)}accuracy", accuracy)
    if not at_clients:
        table.add_row("best accuracy", percent(summary.get("best_accuracy")))
    for name, value in list(shown_metrics(summary).items())[:SHOWN_METRICS]:
        best = summary.get(f"best_{name}", value)
        table.add_row(name, f"{value:.4f}, best {best:.4f}")
    if reason := summary.get("stop_reason"):
        table.add_row("stopped", Text(str(reason)))
    table.add_row("rounds", str(summary.get("rounds", "?")))
    table.add_row("time", seconds)
    table.add_row("sent", f"{up:,.1f} MB to the server, {down:,.1f} MB to the clients")
    title = f"{summary.get('strategy', 'run')} on {summary.get('task', '?')}: {how}"
    return Panel(table, title=Text(title), title_align="left", border_style=color, expand=False)


def percent(share: float | None, missing: str = "not measured") -> str:
    """Return a share in [0, 1] as a percentage, or ``missing`` for None."""
    return missing if share is None else f"{100 * share:.2f} %"
