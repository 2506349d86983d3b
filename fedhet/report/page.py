"""The page: its parts and their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedhet.plot import can_plot
from fedhet.report import figures
from fedhet.report.blocks import Block, Entry, Heading, Key, Listing, Paragraph, Table, Warn
from fedhet.report.colors import keys_of
from fedhet.report.data_file import Partition, ReportData
from fedhet.report.layout import Layout, automatic_layout
from fedhet.report.provenance import surroundings, warnings
from fedhet.report.published_tables import PaperError, paper_layout, read_paper
from fedhet.report.run_data import Run
from fedhet.report.score_chart import scores, single_round
from fedhet.report.statistics import Figure
from fedhet.report.tables import (
    accuracies_table,
    main_table,
    settings_table,
    target_tables,
)
from reproductions.feddw.class_relations import class_relations
from reproductions.feddw.weight_norms import weight_norms
from reproductions.fedmrur.update_agreement import agreement
from reproductions.fedpvr.layer_plots import layers
from reproductions.maecho.fusion_path_plot import fusion
from reproductions.maecho.generated_images import generated
from reproductions.maecho.neuron_plot import neurons

SHOWN_SETTINGS = (
    "task.name",
    "task.model",
    "task.train_size",
    "partition.name",
    "partition.alpha",
    "partition.classes",
    "partition.holdout",
    "clients",
    "participation",
    "rounds",
    "local.epochs",
    "local.steps",
    "local.batch_size",
    "local.lr",
    "local.optimizer",
    "local.momentum",
    "local.weight_decay",
    "local.clip",
    "local.drop_last",
    "schedule._target_",
    "server.lr",
    "strategy.aggregator._target_",
    "target_accuracy",
    "runtime.name",
)


@dataclass(frozen=True)
class Section:
    """Runs that are laid out together."""

    title: str
    layout: Layout
    figure: Figure
    note: str
    targets: tuple[float, ...]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...] = ()


def build_page(
    data: ReportData, partitions: Callable[[], Sequence[Partition]], folder: Path, name: str
) -> list[Block]:
    """Return the page, and write its pictures into the folder.

    Args:
        data: what the page is made from.
        partitions: returns who holds which classes; called late, for counting takes its time.
        folder: of the report.
        name: how the pictures' names begin.
    """
    sections = sections_of(data)
    lines = [(line.label, line.method) for s in sections for line in s.layout.lines]
    keys = keys_of(lines)
    blocks: list[Block] = [Heading(1, page_title(data, sections)), Paragraph(_overview(data))]
    blocks += [Listing([o.command for o in data.origins if o.command], code=True)]
    blocks += warnings(data)
    if not can_plot():
        blocks.append(
            Warn("No pictures: matplotlib is missing. pip install -e '.[plots]' brings it.")
        )
    for number, section in enumerate(sections):
        stem = f"{name}_{number + 1}" if len(sections) > 1 else name
        blocks += _section(section, data, keys, partitions, folder / stem)
    blocks += figures.partitions(partitions(), folder / name)
    blocks += surroundings(data)
    return [block for block in blocks if not (isinstance(block, Listing) and not block.items)]


def sections_of(data: ReportData) -> list[Section]:
    """Return the runs by the paper's table that they belong to; the others follow."""
    groups: list[tuple[Mapping[str, Any] | None, list[Run]]] = []
    for run in data.runs:
        if not run.settings:
            continue  # nothing says where it belongs; it is named among the runs
        paper = None if data.by else run.paper
        for known, runs in groups:
            if known == paper:
                runs.append(run)
                break
        else:
            groups.append((paper, [run]))
    groups.sort(key=lambda group: group[0] is None)
    return [_lay_out(paper, runs, data) for paper, runs in groups]


def _lay_out(node: Mapping[str, Any] | None, runs: Sequence[Run], data: ReportData) -> Section:
    problems: tuple[str, ...] = ()
    if node is not None:
        try:
            paper = read_paper(node)
        except PaperError as error:
            problems = (f"The paper's table is not shown, for its description is wrong: {error}.",)
        else:
            layout = paper_layout(runs, paper)
            targets = tuple(data.targets) or paper.targets
            return Section(paper.source, layout, paper.figure, paper.note, targets, tuple(runs))
    layout = automatic_layout(runs, data.by)
    title = "Methods" if layout.columns == ("all runs",) else f"Methods by {_by(layout)}"
    measured = any(run.points("accuracy") for run in runs)
    figure = Figure("accuracy", percent=True) if measured else Figure("loss")
    return Section(title, layout, figure, "", tuple(data.targets), tuple(runs), problems)


def _by(layout: Layout) -> str:
    words = layout.columns[0].split(", ")
    return ", ".join(word.rpartition(" ")[0] or "task" for word in words)


def page_title(data: ReportData, sections: Sequence[Section]) -> str:
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
    done = sum(run.status == "completed" for run in data.runs)
    return (
        f"{len(data.runs)} runs, {done} of them completed. Task: {', '.join(tasks) or 'unknown'}. "
        f"Methods: {', '.join(methods)}. Seeds: {', '.join(map(str, seeds)) or 'unknown'}."
    )


def _section(
    section: Section,
    data: ReportData,
    keys: Mapping[str, Key],
    partitions: Callable[[], Sequence[Partition]],
    stem: Path,
) -> list[Block]:
    layout, figure = section.layout, section.figure
    blocks: list[Block] = [Heading(2, section.title)]
    blocks += [Warn(text) for text in section.warnings]
    blocks += [Paragraph(section.note)] if section.note else []
    blocks += [main_table(layout, figure)]
    blocks += [Warn(note) for note in layout.notes]
    if not any(cell.runs for line in layout.lines for cell in line.cells):
        return [*blocks, *_settings(section)]
    if any(run.points("accuracy") for run in section.runs):
        blocks += _accuracies(section, keys, stem)
    blocks += agreement(layout, keys, data.every, stem)
    blocks += layers(layout, keys, stem)
    blocks += figures.diagnostics(layout, keys, data.every, stem)
    blocks += class_relations(layout, partitions, stem)
    blocks += weight_norms(layout, partitions, stem)
    blocks += generated(layout, partitions, stem)
    blocks += fusion(layout, stem)
    blocks += neurons(layout, stem)
    return [*blocks, *_settings(section)]


def _accuracies(section: Section, keys: Mapping[str, Key], stem: Path) -> list[Block]:
    layout, last_round = section.layout, section.figure.last_round
    if single_round(layout):
        blocks = scores(layout, keys, section.figure, stem)
        return [*blocks, Heading(3, "Accuracy"), accuracies_table(layout, last_round)]
    blocks = figures.accuracy(layout, keys, last_round, section.targets, stem)
    blocks += [Heading(3, "Rounds and bytes to a target")]
    blocks += [
        Paragraph(
            "Rounds until the accuracy on the test set first reaches the target, and the "
            "megabytes up and down until then, all clients together. > R: at least one run has "
            "not reached it in R rounds."
        )
    ]
    blocks += [table for _, table in target_tables(layout, section.targets, last_round)]
    return [*blocks, Heading(3, "Accuracy"), accuracies_table(layout, last_round)]


def _settings(section: Section) -> list[Block]:
    rows = []
    for key in SHOWN_SETTINGS:
        values = dict.fromkeys(str(r.settings[key]) for r in section.runs if key in r.settings)
        shown = ", ".join(value.rpartition("strategies.")[2] for value in values)
        if values and shown != "None":
            rows.append([Entry(key), Entry(shown)])
    table = Table(
        ["setting", "value"], rows, "All settings are in each run's config.yaml.", words=2
    )
    differing = settings_table(section.layout)
    return [Heading(3, "Settings"), table, *([differing] if differing else [])]
