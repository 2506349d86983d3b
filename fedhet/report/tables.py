"""The tables of a section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from fedhet.common.metrics import metric_of
from fedhet.report.blocks import Entry, Table
from fedhet.report.layout import NO_COLUMN, Cell, Layout, Published, differing_settings
from fedhet.report.names import column_title
from fedhet.report.run_data import Run, evaluation_place
from fedhet.report.statistics import (
    ACCURACIES,
    TO_TARGET,
    Figure,
    decimals,
    estimate,
    mean_text,
    percent,
    sensible_targets,
    trained,
)


def main_table(layout: Layout, figure: Figure) -> Table:
    """Return rows by columns: mean and spread, the paper's number, and the difference.

    With several targets there are rows for each of them.
    """
    counts = {len(cell.runs) for cell in layout.measured}
    records = []
    singles = [replace(figure, target=target, targets=()) for target in figure.targets]
    for number, single in enumerate(singles or [figure]):
        best = [_best(layout.column(column), single) for column in layout.columns]
        digits = _digits(single, layout.cells)
        for label, row in layout.rows.items():
            name = f"{label} to {percent(figure.targets[number])}" if singles else label
            under = "" if any(cell.runs for cell in row) else row[0].not_run
            records.append([Entry(name, under)])
            for cell in row:
                paper = cell.published[number] if cell.published else Published()
                text, under = _main_texts(cell, single, paper, digits, with_count=len(counts) > 1)
                records[-1].append(Entry(text, under, best=cell in best))
    published = [number for cell in layout.cells for number in cell.published]
    frame = pd.DataFrame(records, columns=["method", *layout.columns])
    return Table(frame, _caption(figure, counts, published))


def _best(cells: Sequence[Cell], figure: Figure) -> Cell | None:
    """Return the cell of a column with the best mean; None of fewer than two."""
    found = [(cell, estimate(figure, cell.runs)) for cell in cells]
    known = [(each.mean, cell) for cell, each in found if each and not each.bounds]
    best = max if figure.larger_is_better else min
    return best(known, key=lambda pair: pair[0])[1] if len(known) > 1 else None


def _caption(figure: Figure, counts: set[int], published: Sequence[Published]) -> str:
    words = [f"{figure.title[0].upper()}{figure.title[1:]}."]
    if counts == {1}:
        words.append("One run per cell (n = 1), so no spread is shown.")
    elif len(counts) == 1:
        words.append(f"Mean ± sample standard deviation over n = {counts.pop()} seeds.")
    elif counts:
        words.append("Mean ± sample standard deviation over n seeds; for n = 1 no spread is shown.")
    if figure.last_round:
        words.append(f"Rounds after {figure.last_round} are left out.")
    if published:
        less = ", and ours minus it" if any(each.mean is not None for each in published) else ""
        words.append(f"Below each: the paper's number{less}.")
    return " ".join(words)


def _main_texts(
    cell: Cell, figure: Figure, published: Published, digits: int, *, with_count: bool
) -> tuple[str, str]:
    """Return our mean, or why there is none, and the paper's number."""
    ours, paper = estimate(figure, cell.runs), published.text and f"paper {published.text}"
    if ours is None:
        partial = dict.fromkeys(_partial(run, figure, digits) for run in cell.others)
        return "not measured" if cell.runs else ", ".join(partial) or "not run", paper
    text = ours.text(digits)
    if with_count or ours.count < len(cell.runs):
        text += f" (n = {ours.count})"
    if published.mean is not None and not ours.bounds:
        least = min(digits, 1) if abs(published.mean) > 1 else digits  # as papers have them
        paper += f" ({ours.mean - published.mean:+.{least}f})"
    return text, paper


def _partial(run: Run, figure: Figure, digits: int) -> str:
    """Return the status of a run that is not completed, with what it measured last."""
    found, rounds = estimate(figure, [run]), run.columns.get("round", ())
    if found is None or not rounds:
        return run.status
    return f"{run.status} after round {rounds[-1]}: {found.text(digits)}"


def _digits(figure: Figure, cells: Iterable[Cell], least: int = 2) -> int:
    found = [estimate(figure, cell.runs or cell.others) for cell in cells]
    return decimals(figure, [one.mean for one in found if one], of_percent=2, least=least)


def _figures_table(
    layout: Layout, figures: Mapping[str, Figure], caption: str, least: int
) -> Table:
    """Return a row for each cell with its number of runs and the figures, by their titles.

    ``least``: decimals of losses, errors and metrics.
    """
    counts = [str(len(cell.runs)) for cell in layout.measured]
    shown = {title: _texts(figure, layout.measured, least) for title, figure in figures.items()}
    return cell_table(layout, pd.DataFrame({"n": counts} | shown), caption)


def _texts(figure: Figure, cells: Sequence[Cell], least: int = 2) -> list[str]:
    """Return an estimate of each cell as text, and of how many runs if some have no value."""
    digits = _digits(figure, cells, least)
    found = [(estimate(figure, cell.runs), len(cell.runs)) for cell in cells]
    return [
        one.text(digits) + (f" (n = {one.count})" if one.count < runs else "") if one else "-"
        for one, runs in found
    ]


def accuracies_table(layout: Layout, figure: Figure) -> Table:
    """Return final, best and late accuracy of each cell, in percent.

    ``figure``: the page's, which has the last round and how many evaluations are late.
    """
    late, runs = figure.evaluations, layout.completed
    titles = ["final accuracy (%)", "best (%)", f"mean of the last {late} (%)"]
    figures = {
        title: Figure(name, percent=True, last_round=figure.last_round, evaluations=late)
        for title, name in zip(titles, ACCURACIES, strict=False)
    }
    last = figure.last_round or math.inf
    points = [[(r, value) for r, value in run.points("accuracy") if r <= last] for run in runs]
    averaged = min((len(trained(each)) for each in points if each), default=late)
    fewer = f" (of as many as there are: {averaged} at least)" if averaged < late else ""
    caption = (
        f"Accuracy {evaluation_place(runs)}: after the last round, of the best evaluation, and the "
        f"mean of the last {late} evaluations{fewer}, which is less noisy. Mean ± sample standard "
        "deviation over n seeds."
    )
    return _figures_table(layout, figures, caption, 2)


def metrics_tables(layout: Layout, names: Sequence[str], last_round: int | None) -> list[Table]:
    """Return the last and best value of each metric by cell, and its last values by class."""
    whole = [name for name in names if "/" not in name]
    found = []
    for name in whole:  # of the user's own no best: which values are better is not known
        figures = (name, f"best_{name}") if metric_of(name) else (name,)
        found += [Figure(figure, last_round=last_round) for figure in figures]
    caption = (
        "After the last round and the best evaluation. Client: mean over the clients, on theirs; "
        "others: on the test set. Mean ± sample standard deviation over n seeds."
    )
    titled = {figure.title: figure for figure in found}
    tables = [_figures_table(layout, titled, caption, 4)] if whole else []
    for metric in dict.fromkeys(name.partition("/")[0] for name in names):
        own = [name for name in names if name.startswith(f"{metric}/")]
        of_classes = [Figure(name, last_round=last_round) for name in own]
        frame = pd.DataFrame({"class": [name.partition("/")[2] for name in own]})
        for cell in layout.measured:
            frame[cell.name] = [text for one in of_classes for text in _texts(one, [cell], 4)]
        caption = f"{column_title(metric)} of each class after the last round."
        tables += [Table(frame, caption)] if own else []
    return tables


def cell_table(layout: Layout, frame: pd.DataFrame, caption: str) -> Table:
    """Return a frame with a row for each cell that has runs, named by its column and row."""
    cells = layout.measured
    named = pd.DataFrame({"column": [c.column for c in cells], "method": [c.row for c in cells]})
    if layout.columns == (NO_COLUMN,):
        named = named[["method"]]
    return Table(pd.concat([named, frame], axis="columns"), caption, words=named.shape[1])


def values_table(
    layout: Layout,
    names: Sequence[str],
    values: Callable[[Run], Mapping[str, float]],
    caption: str,
    text: Callable[[Sequence[float]], str] = mean_text,
) -> Table:
    """Return a row for each cell that has runs, with a text of the runs' values of each name."""
    rows = []
    for cell in layout.measured:
        found = [values(run) for run in cell.runs]
        rows.append({name: text([own[name] for own in found if name in own]) for name in names})
    return cell_table(layout, pd.DataFrame(rows), caption)


def target_tables(layout: Layout, targets: Sequence[float], last_round: int | None) -> list[Table]:
    """Return rounds, megabytes and simulated seconds to the targets, a table for each column.

    Without targets, they are chosen for each column from the best row's best accuracy.
    """
    tables = []
    for column in layout.columns:
        cells = [cell for cell in layout.column(column) if cell.runs]
        chosen = list(targets) or _column_targets(cells, last_round)
        if not cells or not chosen:
            continue
        frame = pd.DataFrame({"method": [cell.row for cell in cells]})
        timed = any(run.spent("simulated_seconds") for cell in cells for run in cell.runs)
        for name in TO_TARGET if timed else TO_TARGET[:2]:
            for figure in (Figure(name, target, last_round=last_round) for target in chosen):
                frame[figure.title] = _texts(figure, cells)
        listed = ", ".join(percent(target) for target in chosen)
        origin = "." if targets else ": of 50, 80 and 95 % of the best row's best accuracy."
        where = "Targets" if column == NO_COLUMN else f"{column}: targets"
        tables.append(Table(frame, f"{where} {listed}{origin}"))
    return tables


def _column_targets(cells: Sequence[Cell], last_round: int | None) -> list[float]:
    """Return targets above the accuracy of the initial model."""
    best = Figure("best_accuracy", last_round=last_round)
    initial = Figure("accuracy", last_round=0)
    bests, starts = (
        [found.mean for cell in cells if (found := estimate(figure, cell.runs))]
        for figure in (best, initial)
    )
    return [target for target in sensible_targets(bests) if target > max(starts, default=0.0)]


def settings_table(layout: Layout) -> Table | None:
    """Return the settings in which rows differ except their methods' own; None without any."""
    keys = differing_settings(layout)
    if not keys:
        return None
    runs = {row: [run for c in cells for run in c.runs] for row, cells in layout.rows.items()}
    rows = [
        {"method": row}
        | {
            key: ", ".join(dict.fromkeys(str(r.settings.get(key, "-")) for r in own))
            for key in keys
        }
        for row, own in runs.items()
        if own
    ]
    caption = "Settings in which the rows differ, except strategy.*"
    return Table(pd.DataFrame(rows), caption, words=len(keys) + 1)
