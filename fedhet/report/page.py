"""Puts the parts of the page in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.common.errors import ConfigError
from fedhet.common.results import COMPLETED
from fedhet.plot import can_plot
from fedhet.report import figures, paper_figures
from fedhet.report.blocks import Block, Entry, Heading, Key, Listing, Paragraph, Table, Warn
from fedhet.report.colors import keys_of
from fedhet.report.data_file import ReportData
from fedhet.report.distrusted import distrusted
from fedhet.report.layer_plots import layers
from fedhet.report.layout import KNOWN_KEYS, NO_COLUMN, Layout, automatic_layout, cells_with_runs
from fedhet.report.paper_figures import Partitions
from fedhet.report.provenance import provenance, warnings
from fedhet.report.published_tables import paper_layout, read_paper
from fedhet.report.run_data import Run
from fedhet.report.score_chart import scores, single_round
from fedhet.report.statistics import Figure, measured_metrics
from fedhet.report.tables import (
    accuracies_table,
    main_table,
    metrics_tables,
    settings_table,
    target_tables,
)
from fedhet.report.update_agreement import agreement


@dataclass(frozen=True)
class Section:
    """Runs that are laid out together."""

    title: str
    layout: Layout
    figure: Figure
    targets: Sequence[float]
    runs: Sequence[Run]
    note: str = ""
    warnings: tuple[str, ...] = ()


def build_page(data: ReportData, partitions: Partitions, folder: Path, name: str) -> list[Block]:
    """Return the page, and write its pictures into the folder; ``name`` begins their names.

    ``partitions`` returns the class counts; it is called late, since counting takes time.
    """
    sections = sections_of(data)
    keys = keys_of([(line.label, line.method) for s in sections for line in s.layout.lines])
    blocks: list[Block] = [Heading(1, page_title(data)), Paragraph(_overview(data))]
    if commands := [origin.command for origin in data.origins if origin.command]:
        blocks.append(Listing(commands, code=True))
    blocks += warnings(data)
    if not can_plot():
        text = "No pictures: matplotlib is missing. pip install -e '.[plots]' brings it."
        blocks.append(Warn(text))
    for number, section in enumerate(sections):
        stem = f"{name}_{number + 1}" if len(sections) > 1 else name
        blocks += _section(section, data, keys, partitions, folder / stem)
    blocks += figures.partitions(partitions(), folder / name)
    return blocks + provenance(data)


def sections_of(data: ReportData) -> list[Section]:
    """Return the runs by the paper's table that they belong to, then the others."""
    groups: list[tuple[Mapping[str, Any] | None, list[Run]]] = []
    for run in data.runs:
        if not run.settings:
            continue  # its recipe is unknown: it is listed under Runs only
        paper = None if data.by else run.paper
        group = next((runs for known, runs in groups if known == paper), None)
        if group is None:
            group = []
            groups.append((paper, group))
        group.append(run)
    groups.sort(key=lambda group: group[0] is None)
    return [_lay_out(paper, runs, data) for paper, runs in groups]


def _lay_out(node: Mapping[str, Any] | None, runs: Sequence[Run], data: ReportData) -> Section:
    problems: tuple[str, ...] = ()
    if node is not None:
        try:
            paper = read_paper(node)
        except ConfigError as error:
            problems = (f"The paper's table is not shown, since its description is wrong: {error}",)
        else:
            layout, targets = paper_layout(runs, paper), data.targets or paper.targets
            return Section(paper.source, layout, paper.figure, targets, runs, paper.note)
    layout = automatic_layout(runs, data.by)
    keys = [word.rpartition(" ")[0] or "task" for word in layout.columns[0].split(", ")]
    title = "Methods" if layout.columns == (NO_COLUMN,) else f"Methods by {', '.join(keys)}"
    measured = any(run.points("accuracy") for run in runs)
    figure = Figure("accuracy", percent=True) if measured else Figure("loss")
    return Section(title, layout, figure, data.targets, runs, warnings=problems)


def page_title(data: ReportData) -> str:
    """Return the page's title: the given one, or the sources' names."""
    names = list(dict.fromkeys(origin.name for origin in data.origins))
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return data.title or (f"Report: {shown}" if shown else "Report")


def _overview(data: ReportData) -> str:
    methods = dict.fromkeys(run.method for run in data.runs)
    seeds = sorted({run.seed for run in data.runs if run.seed is not None})
    tasks = dict.fromkeys(
        str(r.settings["task.name"]) for r in data.runs if "task.name" in r.settings
    )
    done = sum(run.status == COMPLETED for run in data.runs)
    return (
        f"{len(data.runs)} runs, {done} of them completed. Task: {', '.join(tasks) or 'unknown'}. "
        f"Methods: {', '.join(methods)}. Seeds: {', '.join(map(str, seeds)) or 'unknown'}."
    )


def _section(
    section: Section, data: ReportData, keys: Mapping[str, Key], partitions: Partitions, stem: Path
) -> list[Block]:
    layout = section.layout
    blocks: list[Block] = [Heading(2, section.title)]
    blocks += [Warn(text) for text in section.warnings]
    blocks += [Paragraph(section.note)] if section.note else []
    blocks += [main_table(layout, section.figure)]
    blocks += [Warn(note) for note in layout.notes]
    if any(run.points("accuracy") for run in section.runs):
        blocks += _accuracies(section, keys, stem)
    if cells_with_runs(layout):
        if names := measured_metrics(section.runs):
            blocks += [Heading(3, "Metrics"), *figures.metrics(layout, keys, names, stem)]
            blocks += metrics_tables(layout, names, section.figure.last_round)
        blocks += agreement(layout, keys, data.every, stem)
        blocks += layers(layout, keys, stem)
        blocks += figures.diagnostics(layout, keys, data.every, stem)
        blocks += paper_figures.sections(section.runs, layout, partitions, stem)
    return [*blocks, *distrusted(section.runs), *_settings(section)]


def _accuracies(section: Section, keys: Mapping[str, Key], stem: Path) -> list[Block]:
    layout, last_round = section.layout, section.figure.last_round
    single = single_round(layout)
    if single:
        blocks = scores(layout, keys, section.figure, stem)
    else:
        blocks = figures.accuracy(layout, keys, last_round, section.targets, stem)
    if not cells_with_runs(layout):
        return blocks
    if not single:
        text = (
            "Rounds until the accuracy on the test set first reaches the target, and the megabytes "
            "up and down until then, all clients together. > R: at least one run has not reached "
            "it in R rounds."
        )
        blocks += [Heading(3, "Rounds and bytes to a target"), Paragraph(text)]
        blocks += target_tables(layout, section.targets, last_round).values()
    return [*blocks, Heading(3, "Accuracy"), accuracies_table(layout, last_round)]


def _settings(section: Section) -> list[Block]:
    rows = []
    for key in KNOWN_KEYS:
        values = dict.fromkeys(str(r.settings[key]) for r in section.runs if key in r.settings)
        parts = 2 if key.endswith("_target_") else 0  # module and class
        shown = ", ".join(".".join(value.split(".")[-parts:]) for value in values)
        if values and shown != "None":
            rows.append([Entry(key), Entry(shown)])
    caption = "All settings are in each run's config.yaml."
    differing = settings_table(section.layout)
    table = Table(["setting", "value"], rows, caption, words=2)
    return [Heading(3, "Settings"), table, *([differing] if differing else [])]
