"""How a terminal shows a run."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from common.results import Row


class Display(Protocol):
    """Shows the rounds of a run as they come; a context manager."""

    def __enter__(self) -> Display:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End."""

    def show(self, row: Row) -> None:
        """Show that a round has ended."""


class BarDisplay:
    """A bar over rounds, for a terminal."""

    def __init__(self, console: Console, title: str, rounds: int) -> None:
        """Prepare a bar of ``rounds`` rounds."""
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[round]}"),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._rounds = rounds
        self._latest: dict[str, Any] = {}
        self._task = self._progress.add_task(
            title, total=rounds, round=f"round 0/{rounds}", figures="[dim]starting"
        )

    def __enter__(self) -> BarDisplay:
        """Begin."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End."""
        self._progress.stop()

    def show(self, row: Row) -> None:
        """Move the bar, and put what went wrong in a round above it."""
        self._latest |= {key: value for key, value in row.items() if value is not None}
        self._progress.update(
            self._task,
            completed=row["round"],
            round=f"round {row['round']}/{self._rounds}",
            figures=figures(self._latest),
        )
        for failure in row.get("failures", ()):
            warning = Text(f"round {row['round']}: {failure}", style="yellow")
            self._progress.console.print(warning)


class LineDisplay:
    """A line per evaluated round, for a log."""

    def __init__(self, console: Console, title: str, rounds: int) -> None:
        """Prepare lines for ``rounds`` rounds."""
        self._console = console
        self._title = title
        self._rounds = rounds

    def __enter__(self) -> LineDisplay:
        """Say what starts."""
        self._print(f"{self._title}: starting, {self._rounds} rounds to do")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End."""

    def show(self, row: Row) -> None:
        """Print a round that was evaluated, and all that went wrong in any round."""
        if row.get("accuracy") is not None or row["round"] == self._rounds:
            self._print(f"round {row['round']:>3}/{self._rounds}  {figures(row)}")
        for failure in row.get("failures", ()):
            self._print(f"round {row['round']:>3}/{self._rounds}  {failure}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def display_for(console: Console, title: str, rounds: int) -> Display:
    """Return the bar for a terminal, lines for everything else."""
    return (BarDisplay if console.is_terminal else LineDisplay)(console, title, rounds)


def figures(row: Row) -> str:
    """Return a round's figures in words; what was not measured is left out."""
    words = []
    if row.get("accuracy") is not None:
        words.append(f"accuracy {percent(row['accuracy'])}")
    if row.get("loss") is not None:
        words.append(f"loss {row['loss']:.4f}")
    if row.get("seconds") is not None:
        words.append(f"{row['seconds']:.2f} s/round")
    return "  ".join(words)


def closing_panel(summary: Mapping[str, Any]) -> Panel:
    """Return what a finished run ends with."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    best = percent(summary.get("best_accuracy"))
    table.add_row("accuracy", Text(percent(summary.get("accuracy")), style="bold green"))
    table.add_row("best accuracy", best)
    table.add_row("rounds", str(summary.get("rounds", "?")))
    table.add_row("time", _seconds(summary))
    table.add_row("sent", _traffic(summary))
    title = f"{summary.get('strategy', 'run')} on {summary.get('task', '?')}: done"
    return Panel(table, title=Text(title), title_align="left", border_style="green", expand=False)


def percent(share: float | None) -> str:
    """Return a share as a percentage, or that it was not measured."""
    return "not measured" if share is None else f"{100 * share:.2f} %"


def _seconds(summary: Mapping[str, Any]) -> str:
    words = f"{summary.get('seconds') or 0:.1f} s in rounds"
    per_round = summary.get("seconds_per_round")
    return words if per_round is None else f"{words}, {per_round:.2f} s each"


def _traffic(summary: Mapping[str, Any]) -> str:
    up, down = (summary.get(key) or 0 for key in ("bytes_up", "bytes_down"))
    return f"{up / 1e6:,.1f} MB to the server, {down / 1e6:,.1f} MB to the clients"
