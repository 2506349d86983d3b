"""The tables of a section."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import pandas as pd

from fedhet.common.metrics import metric_of
from fedhet.report.blocks import Entry, Table
from fedhet.report.layout import NO_COLUMN, Cell, Layout, Published, differing_settings
from fedhet.report.names import column_title
from fedhet.report.run_data import Run, evaluation_place
from fedhet.report.statistics import (
    ACCURACIES,
    Estimate,
    Figure,
    decimals,
    estimate,
    percent,
    sensible_targets,
    spent_by,
)


def main_table(layout: Layout, figure: Figure) -> Table:
    """Return rows by columns: mean and spread, the paper's number, and the difference."""
    counts = {len(cell.runs) for cell in layout.measured}
    records = []
    for single, rows in _by_target(layout.rows, figure):
        cells = [cell for row in rows.values() for cell in row]
        best = {column: _best(cells, column, single) for column in layout.columns}
        digits = _digits(single, cells)
        for label, row in rows.items():
            under = "" if any(cell.runs for cell in row) else row[0].not_run
            records.append([Entry(label, under)])
            for cell in row:
                entry = _main_entry(cell, single, digits, with_count=len(counts) > 1)
                records[-1].append(replace(entry, best=best[cell.column] is cell))
    published = [cell.published for cell in layout.cells if cell.published]
    frame = pd.DataFrame(records, columns=["method", *layout.columns])
    return Table(frame, _caption(figure, counts, published))


def _best(cells: Sequence[Cell], column: str, figure: Figure) -> Cell | None:
    """Return the cell of a column with the best mean; None of fewer than two."""
    found = [(cell, estimate(figure, cell.runs)) for cell in cells if cell.column == column]
    known = [(each.mean, cell) for cell, each in found if each and each.complete]
    best = max if figure.larger_is_better else min
    return best(known, key=lambda pair: pair[0])[1] if len(known) > 1 else None


Rows = Mapping[str, Sequence[Cell]]


def _by_target(rows: Rows, figure: Figure) -> Iterator[tuple[Figure, Rows]]:
    """Yield the figure of each target, and the rows with the paper's numbers for it."""
    if not figure.targets:
        yield figure, rows
        return
    for number, target in enumerate(figure.targets):
        own = {
            f"{label} to {percent(target)}": [
                replace(cell, published=cell.published and cell.published.by_target[number])
                for cell in row
            ]
            for label, row in rows.items()
        }
        yield Figure(figure.name, target, last_round=figure.last_round), own


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
        same = all(each.target is None for each in published)
        words.append(f"Below each: the paper's number{', and ours minus it' if same else ''}.")
    return " ".join(words)


def _main_entry(cell: Cell, figure: Figure, digits: int, *, with_count: bool) -> Entry:
    ours = estimate(figure, cell.runs)
    paper = _published_text(cell.published)
    if ours is None:
        return Entry(_missing(cell, figure, digits), f"paper {paper}" if paper else "")
    text = ours.text(digits)
    if with_count or ours.count < len(cell.runs):
        text += f" (n = {ours.count})"
    under = f"paper {paper}{_difference(ours, cell.published, digits)}" if paper else ""
    return Entry(text, under)


def _digits(figure: Figure, cells: Iterable[Cell], least: int = 2) -> int:
    found = [estimate(figure, cell.runs or cell.others) for cell in cells]
    return decimals(figure, [one.mean for one in found if one], of_percent=2, least=least)


def _missing(cell: Cell, figure: Figure, digits: int) -> str:
    """Return why a cell has no mean, and how far its runs came."""
    if cell.runs:
        return "not measured"
    partial = dict.fromkeys(_partial(run, figure, digits) for run in cell.others)
    return ", ".join(partial) or "not run"


def _partial(run: Run, figure: Figure, digits: int) -> str:
    """Return the status of a run that is not completed, with what it measured last."""
    found, rounds = estimate(figure, [run]), run.columns.get("round", ())
    if found is None or not rounds:
        return run.status
    return f"{run.status} after round {rounds[-1]}: {found.text(digits)}"


def _published_text(published: Published | None) -> str:
    if published is None:
        return ""
    if published.mean is None:
        return published.text
    spread = "" if published.spread is None else f" ± {published.spread:g}"
    to = "" if published.target is None else f" to {percent(published.target)}"
    return f"{published.mean:g}{spread}{to}"


def _difference(ours: Estimate, published: Published | None, digits: int) -> str:
    if published is None or published.mean is None or published.target or not ours.complete:
        return ""
    least = min(digits, 1) if abs(published.mean) > 1 else digits  # as papers have them
    return f" ({ours.mean - published.mean:+.{least}f})"


def _figures(layout: Layout, figures: Mapping[str, Figure], least: int) -> pd.DataFrame:
    """Return a row for each cell with its number of runs and the figures, by their titles.

    ``least``: decimals of losses, errors and metrics.
    """
    counts = [str(len(cell.runs)) for cell in layout.measured]
    shown = {title: _texts(figure, layout.measured, least) for title, figure in figures.items()}
    return pd.DataFrame({"n": counts} | shown)


def _texts(figure: Figure, cells: Sequence[Cell], least: int = 2) -> list[str]:
    digits = _digits(figure, cells, least)
    return [_with_count(estimate(figure, cell.runs), len(cell.runs), digits) for cell in cells]


def _with_count(found: Estimate | None, runs: int, digits: int) -> str:
    """Return an estimate as text, and of how many runs it is where some have no value."""
    if found is None:
        return "-"
    return found.text(digits) + (f" (n = {found.count})" if found.count < runs else "")


def accuracies_table(layout: Layout, figure: Figure) -> Table:
    """Return final, best and late accuracy of each cell, in percent.

    ``figure``: the page's, which has the last round and how many evaluations are late.
    """
    late = figure.evaluations
    titles = ["final accuracy (%)", "best (%)", f"mean of the last {late} (%)"]
    figures = [
        Figure(name, percent=True, last_round=figure.last_round, evaluations=late)
        for name in ACCURACIES[: len(titles)]
    ]
    runs = layout.completed
    averaged = min((value.averaged for run in runs if (value := figures[-1].of(run))), default=late)
    fewer = f" (of as many as there are: {averaged} at least)" if averaged < late else ""
    caption = (
        f"Accuracy {evaluation_place(runs)}: after the last round, of the best evaluation, and the "
        f"mean of the last {late} evaluations{fewer}, which is less noisy. Mean ± sample standard "
        "deviation over n seeds."
    )
    found = dict(zip(titles, figures, strict=True))
    return cell_table(layout, _figures(layout, found, 2), caption)


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
    frame = _figures(layout, {figure.title: figure for figure in found}, 4)
    classified = dict.fromkeys(name.partition("/")[0] for name in names)
    by_class = [_by_class(layout, name, names, last_round) for name in classified]
    over_all = [cell_table(layout, frame, caption)] if whole else []
    return [*over_all, *(table for table in by_class if len(table.frame))]


def _by_class(layout: Layout, metric: str, names: Sequence[str], last_round: int | None) -> Table:
    own = [name for name in names if name.startswith(f"{metric}/")]
    frame = pd.DataFrame({"class": [name.partition("/")[2] for name in own]})
    figures = [Figure(name, last_round=last_round) for name in own]
    for cell in layout.measured:
        frame[cell.name] = [text for figure in figures for text in _texts(figure, [cell], 4)]
    return Table(frame, f"{column_title(metric)} of each class after the last round.")


def cell_table(layout: Layout, frame: pd.DataFrame, caption: str) -> Table:
    """Return a frame with a row for each cell that has runs, named by its column and row."""
    cells = layout.measured
    named = pd.DataFrame({"column": [c.column for c in cells], "method": [c.row for c in cells]})
    if layout.columns == (NO_COLUMN,):
        named = named[["method"]]
    return Table(pd.concat([named, frame], axis="columns"), caption, words=named.shape[1])


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
        for name in spent_by(run for cell in cells for run in cell.runs):
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
