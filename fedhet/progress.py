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
        if row.get("accuracy") is not None or row["round"] == rounds:
            line(f"{words}  {figures(row)}")
        for failure in row.get("failures", ()):
            line(f"{words}  {failure}")

    line(f"{title}: starting, {rounds} rounds to do")
    yield write


def figures(row: Row) -> str:
    """Return a round's figures as text; what was not measured is left out."""
    words = []
    if row.get("accuracy") is not None:
        words.append(f"accuracy {percent(row['accuracy'])}")
    if row.get("loss") is not None:
        words.append(f"loss {row['loss']:.4f}")
    if row.get("seconds") is not None:
        words.append(f"{row['seconds']:.2f} s/round")
    return "  ".join(words)


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
    table.add_row("accuracy", Text(percent(summary.get("accuracy")), style=f"bold {color}"))
    table.add_row("best accuracy", percent(summary.get("best_accuracy")))
    table.add_row("rounds", str(summary.get("rounds", "?")))
    table.add_row("time", seconds)
    table.add_row("sent", f"{up:,.1f} MB to the server, {down:,.1f} MB to the clients")
    title = f"{summary.get('strategy', 'run')} on {summary.get('task', '?')}: {how}"
    return Panel(table, title=Text(title), title_align="left", border_style=color, expand=False)


def percent(share: float | None, missing: str = "not measured") -> str:
    """Return a share in [0, 1] as a percentage, or ``missing`` for None."""
    return missing if share is None else f"{100 * share:.2f} %"
