"""How a terminal, or a log, shows one run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, SpinnerColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fedhet.common.metrics import SHOWN_METRICS, MetricName, measured_where, shown_metrics
from fedhet.common.results import COMPLETED, Row, said_once


class Display(Protocol):
    """Shows one run."""

    def stage(self, words: str) -> None:
        """Say what happens before the first round is shown."""

    def warn(self, text: str) -> None:
        """Show what the run warns of."""

    def row(self, row: Row) -> None:
        """Show a finished round."""


@contextmanager
def round_display(console: Console, title: str, rounds: int) -> Iterator[Display]:
    """Give a display of a run: a progress bar on a terminal, else a line per round."""
    if not console.is_terminal:
        yield _Lines(console, title, rounds)
        return
    first = SpinnerColumn(), "[bold]{task.description}", BarColumn(bar_width=24)
    last = "{task.fields[round]}", "{task.fields[figures]}", TimeElapsedColumn()
    with Progress(*first, *last, "{task.fields[left]}", console=console) as bar:
        yield _Bar(bar, title, rounds)


class _Bar:
    """A progress bar with the latest figures and the time that is left."""

    def __init__(self, bar: Progress, title: str, rounds: int) -> None:
        self.bar, self.rounds = bar, rounds
        self.task = bar.add_task(title, total=rounds, round="", figures="starting", left="")
        self.latest: Row = {}
        self.first: tuple[int, float] | None = None  # the first round shown, and when

    def stage(self, words: str) -> None:
        if self.first is None:
            self.bar.update(self.task, figures=words)

    def warn(self, text: str) -> None:
        self.bar.console.print(Text(text, style="yellow"))

    def row(self, row: Row) -> None:
        self.latest.update({key: value for key, value in row.items() if value is not None})
        number, now = row["round"], time.monotonic()
        self.first = self.first or (number, now)
        words = f"round {number}/{self.rounds}"
        left = time_left(number - self.first[0], now - self.first[1], self.rounds - number)
        self.bar.update(
            self.task, completed=number, round=words, figures=figures(self.latest), left=left
        )
        for failure in said_once(row.get("failures", ())):
            self.warn(f"round {number}: {failure}")


class _Lines:
    """A line per evaluated round, for a file."""

    def __init__(self, console: Console, title: str, rounds: int) -> None:
        self.line = partial(console.print, markup=False, highlight=False, soft_wrap=True)
        self.title, self.rounds = title, rounds
        self.line(f"{title}: starting, {rounds} rounds to do")

    def stage(self, words: str) -> None:
        self.line(f"{self.title}: {words}")

    def warn(self, text: str) -> None:
        self.line(f"{self.title}: {text}")

    def row(self, row: Row) -> None:
        words = f"round {row['round']:>3}/{self.rounds}"
        if any(row.get(name) is not None for name in _SHOWN) or row["round"] == self.rounds:
            self.line(f"{words}  {figures(row)}")
        for failure in said_once(row.get("failures", ())):
            self.line(f"{words}  {failure}")


def time_left(done: int, seconds: float, to_do: int) -> str:
    """Return how long ``to_do`` rounds take at the speed of those done; "" if that is unknown."""
    if done < 1 or to_do < 1:
        return ""
    left = round(seconds / done * to_do)
    minutes, hours = left // 60, left // 3600
    text = f"{hours} h {minutes % 60:02} min" if hours else f"{minutes} min {left % 60:02} s"
    return f"{left} s left" if not minutes else f"{text} left"


_SHOWN = ("accuracy", "client_accuracy", "loss", "client_loss")


def figures(row: Row) -> str:
    """Return a round's figures as text; what was not measured is left out."""
    words = []
    accuracy, loss = _judging(row)
    if row.get(accuracy) is not None:
        words.append(f"{_spoken(accuracy)} {percent(row[accuracy])}")
    if row.get(loss) is not None:
        words.append(f"{_spoken(loss)} {row[loss]:.4f}")
    metrics = list(shown_metrics(row).items())[:SHOWN_METRICS]
    words += [f"{_spoken(name)} {value:.4f}" for name, value in metrics]
    if row.get("seconds") is not None:
        words.append(f"{row['seconds']:.2f} s/round")
    return "  ".join(words)


def score(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the name and value of what a round, or a run, is judged by: accuracy, or else loss.

    It is the clients' where the server has measured nothing; the value is empty if they have not.
    """
    accuracy, loss = _judging(values)
    if values.get(accuracy) is None and values.get(loss) is not None:  # not of classes
        return _spoken(loss), f"{values[loss]:.4f}"
    return _spoken(accuracy), percent(values.get(accuracy), "")


def _judging(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the names of accuracy and loss where these are measured."""
    where = measured_where(values)
    return str(MetricName("accuracy", where)), str(MetricName("loss", where))


def _spoken(name: str) -> str:
    return name.replace("client_", "client ")


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
    judged, value = score(summary)
    table.add_row(judged, Text(value or "not measured", style=f"bold {color}"))
    if judged == "accuracy" and value:
        table.add_row("best accuracy", percent(summary.get("best_accuracy")))
    for name, last in list(shown_metrics(summary).items())[:SHOWN_METRICS]:
        best = summary.get(f"best_{name}")  # None of the user's own
        table.add_row(_spoken(name), f"{last:.4f}" + ("" if best is None else f", best {best:.4f}"))
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
