"""Puts the parts of the page in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from fedhet.common.errors import ConfigError
from fedhet.common.results import BY_CLIENT, COMPLETED
from fedhet.report import figures, paper_figures, tables
from fedhet.report.blocks import Block, Chart, Heading, Key, Listing, Paragraph, Table, can_draw
from fedhet.report.by_site import by_site
from fedhet.report.colors import keys_of
from fedhet.report.comparison import Comparison, check_baseline, comparisons, ranked_table, verdict
from fedhet.report.data_file import ReportData
from fedhet.report.layout import KNOWN_KEYS, Layout, automatic_layout, differing_settings
from fedhet.report.names import listed, method_title
from fedhet.report.partitions import partition_blocks
from fedhet.report.provenance import distrusted, provenance, warnings
from fedhet.report.published_tables import paper_layout, read_paper
from fedhet.report.ranks import ranks_section
from fedhet.report.run_data import Run, evaluation_place, score_of
from fedhet.report.statistics import Figure, measured_metrics

NO_CHARTS = "No charts: vl-convert-python is missing. pip install -e '.[plots]' brings it."
MOST_NAMED = 6  # runs that the verdict names if none is completed


@dataclass(frozen=True)
class Section:
    """Runs that are laid out together."""

    title: str
    layout: Layout
    figure: Figure
    targets: Sequence[float]
    runs: Sequence[Run]
    said: Sequence[Block] = ()  # before its tables
    published: bool = False  # whether the layout has a paper's numbers


def build_page(data: ReportData, folder: Path, name: str) -> list[Block]:
    """Return the page, and write its pictures into the folder; ``name`` begins their names."""
    sections = sections_of(data)
    layouts = [section.layout for section in sections]
    check_baseline(layouts, data.baseline)
    keys = legend_keys(layouts)
    compared = [comparisons(s.layout, _compared(s.figure), data.baseline) for s in sections]
    blocks: list[Block] = [Heading(1, data.title or compared_title(data.runs))]
    blocks += [Paragraph(_overview(data))]
    blocks += _verdict(sections, compared)
    blocks += warnings(data)
    if not can_draw():
        blocks.append(Paragraph(NO_CHARTS, warning=True))
    for number, (section, found) in enumerate(zip(sections, compared, strict=True)):
        stem = f"{name}_{number + 1}" if len(sections) > 1 else name
        blocks += _section(section, found, data, keys, folder / stem)
    blocks += partition_blocks(data.partitions, folder / name)
    blocks += provenance(data)
    return blocks if can_draw() else [one for one in blocks if not isinstance(one, Chart)]


def legend_keys(layouts: Sequence[Layout]) -> dict[str, Key]:
    """Return the colour and style of each row; rows that have runs choose first."""
    rows = [cells for layout in layouts for cells in layout.rows.values()]
    rows.sort(key=lambda cells: not any(cell.runs for cell in cells))
    return keys_of([(cells[0].row, cells[0].method) for cells in rows])


def _compared(figure: Figure) -> Figure:
    """Return the figure by which rows are compared; of several targets none is, accuracy is."""
    if figure.targets:
        return Figure("accuracy", percent=True, last_round=figure.last_round)
    return figure


def _ranked_by(section: Section) -> Figure:
    """Return the figure whose ranks the page has: of accuracies over rounds the late mean."""
    if section.figure.name == "accuracy" and not figures.single_round(section.layout):
        return replace(section.figure, name="late_accuracy")
    return _compared(section.figure)


def _verdict(sections: Sequence[Section], compared: Sequence[Sequence[Comparison]]) -> list[Block]:
    sentences = []
    for section, found in zip(sections, compared, strict=True):
        said = verdict(found) or _unfinished(section)
        done = [one.column for one in found]
        empty = [column for column in section.layout.columns if found and column not in done]
        measured = {cell.column for cell in section.layout.measured}
        said += [
            f"{column}: {'not measured' if column in measured else 'no run is completed'}."
            for column in empty
        ]
        if differing := [key for key in differing_settings(section.layout) if _decides(key)]:
            said.append(f"The rows also differ in {listed(differing)}: see the settings below.")
        sentences += [f"{section.title}: {text}" for text in said] if len(sections) > 1 else said
    return [Heading(2, "Verdict"), Listing(sentences, "verdict")] if sentences else []


def _decides(key: str) -> bool:
    """Return whether rows that differ in a key had other work, data, clients or scores."""
    first = key.partition(".")[0]
    kinds = ("task", "partition", "clients", "participation", "rounds")
    return first in kinds or key in ("evaluation.model", "evaluation.clients")


def _unfinished(section: Section) -> list[str]:
    """Return how far the runs of a section are of which none is completed."""
    if section.layout.measured:
        return [f"No run has measured the {section.figure.title}: nothing can be compared."]
    sentences = ["No run is completed, so that nothing can be compared."]
    for run in section.runs[:MOST_NAMED]:
        score = score_of([run])
        if score is not None:
            round, value = run.points(score)[-1]
            shown = f"{100 * value:.1f} %" if score == "accuracy" else f"{value:.4g}"
            sentences.append(
                f"{method_title(run.method)}, seed {run.seed}: {run.status}, {score} {shown} "
                f"after round {round}."
            )
    return sentences


def layouts_of(data: ReportData) -> list[Layout]:
    """Return the layouts of the page's sections."""
    return [section.layout for section in sections_of(data)]


def sections_of(data: ReportData) -> list[Section]:
    """Return the runs by the paper's table that they belong to, then the others.

    Runs whose recipe is unknown are in none: they are listed under Runs only.
    """
    known = [(None if data.by else run.paper, run) for run in data.runs if run.settings]
    papers: list[Mapping[str, Any] | None] = []
    for paper, _ in known:
        papers += [] if paper in papers else [paper]
    papers.sort(key=lambda paper: paper is None)
    return [_lay_out(paper, [run for own, run in known if own == paper], data) for paper in papers]


def _lay_out(node: Mapping[str, Any] | None, runs: Sequence[Run], data: ReportData) -> Section:
    said: list[Block] = []
    if node is not None:
        try:
            paper = read_paper(node)
        except ConfigError as error:
            text = f"The paper's table is not shown, since its description is wrong: {error}"
            said = [Paragraph(text, warning=True)]
        else:
            layout, targets = paper_layout(runs, paper), data.targets or paper.shown_targets
            said = [Paragraph(paper.note)] if paper.note else []
            return Section(paper.source, layout, paper.figure, targets, runs, said, published=True)
    sources = {run.source for run in runs}
    origins = [data.origins[number] for number in sources] if data.origins else []
    varied = origins[0].varied if len(origins) == 1 else ()
    layout = automatic_layout(runs, data.by, varied)
    title = f"Methods by {', '.join(layout.keys)}" if layout.keys else "Methods"
    classifies = score_of(runs) == "accuracy"
    figure = Figure("accuracy", percent=True) if classifies else Figure("loss")
    return Section(title, layout, figure, data.targets, runs, said)


def compared_title(runs: Sequence[Run]) -> str:
    """Return what the page compares: methods, task and partition, and what varies beside."""
    known = [run for run in runs if run.settings] or runs
    methods = listed(method_title(run.method) for run in known)
    on = listed(str(r.settings["task.name"]) for r in known if "task.name" in r.settings)
    partition = _partitions_title(known)
    parts = [f"{methods or 'No method'} on {on or 'an unknown task'}", partition]
    return ", ".join(filter(None, parts))


def _partitions_title(runs: Sequence[Run]) -> str:
    """Return ``dirichlet partition with alpha 0.1 and 1``, or ``data by client``."""
    found: dict[str, list[float]] = {}
    for run in runs:
        if run.summary.get("partition") == BY_CLIENT:
            found[f"data {BY_CLIENT}"] = []
        elif name := run.settings.get("partition.name"):
            alpha = run.settings.get("partition.alpha")
            alphas = found.setdefault(f"{name} partition", [])
            alphas += [] if alpha is None else [float(alpha)]
    return listed(
        name + (f" with alpha {listed(map('{:g}'.format, sorted(a)))}" if a else "")
        for name, a in found.items()
    )


def _overview(data: ReportData) -> str:
    seeds = sorted({run.seed for run in data.runs if run.seed is not None})
    done = sum(run.status == COMPLETED for run in data.runs)
    sources = listed(origin.name for origin in data.origins)
    clients, rounds = (_counts(data.runs, key) for key in ("clients", "rounds"))
    runs = "1 run" if len(data.runs) == 1 else f"{len(data.runs)} runs"
    return (
        f"{runs}, {done} of them completed; {clients}, {rounds}; "
        f"seeds: {', '.join(map(str, seeds)) or 'unknown'}. "
        f"From: {sources or 'a data file'}."
    )


def _counts(runs: Sequence[Run], key: str) -> str:
    """Return ``10 and 50 clients``."""
    found = sorted({int(run.settings[key] or 0) for run in runs if key in run.settings})
    words = key.removesuffix("s") if found == [1] else key
    return f"{listed(map(str, found)) or 'unknown'} {words}"


def _section(
    section: Section,
    compared: Sequence[Comparison],
    data: ReportData,
    keys: Mapping[str, Key],
    stem: Path,
) -> list[Block]:
    layout = section.layout
    blocks: list[Block] = [Heading(2, section.title), *section.said]
    if section.published or len(layout.columns) > 1 or not compared:
        blocks += [Heading(3, "All settings"), tables.main_table(layout, section.figure)]
    if compared:
        blocks += [Heading(3, "Ranking"), ranked_table(compared)]
        blocks += ranks_section(comparisons(layout, _ranked_by(section), data.baseline), stem)
    blocks += [Paragraph(note, warning=True) for note in layout.notes]
    if score := score_of(section.runs):
        blocks += _scores(section, keys, score, stem)
    if layout.measured:
        if names := measured_metrics(section.runs):
            blocks += [Heading(3, "Metrics"), *figures.metrics(layout, keys, names, stem)]
            blocks += tables.metrics_tables(layout, names, section.figure.last_round)
        blocks += by_site(layout)
        blocks += figures.agreement(layout, keys, data.every, stem)
        blocks += figures.layers(layout, keys, stem)
        blocks += figures.diagnostics(layout, keys, data.every, stem)
        blocks += paper_figures.sections(section.runs, layout, data.partitions, stem)
    return [*blocks, *distrusted(section.runs), *_settings(section)]


def _scores(section: Section, keys: Mapping[str, Key], score: str, stem: Path) -> list[Block]:
    layout, last_round = section.layout, section.figure.last_round
    single = figures.single_round(layout)
    if single:
        blocks = figures.single_scores(layout, keys, section.figure, stem)
    else:
        blocks = figures.scores(layout, keys, last_round, section.targets, stem, score)
    if score == "loss" or not layout.measured:
        return blocks
    if not single:
        text = (
            f"Rounds until the accuracy {evaluation_place(section.runs)} first reaches the target, "
            "and the megabytes up and down until then, all clients together. > R: at least one run "
            "has not reached it in R rounds."
        )
        blocks += [Heading(3, "Rounds and bytes to a target"), Paragraph(text)]
        blocks += tables.target_tables(layout, section.targets, last_round)
    return [
        *blocks,
        Heading(3, "Final, best and late accuracy"),
        tables.accuracies_table(layout, section.figure),
    ]


def _settings(section: Section) -> list[Block]:
    rows = []
    for key in KNOWN_KEYS:
        values = dict.fromkeys(str(r.settings[key]) for r in section.runs if key in r.settings)
        parts = 2 if key.endswith("_target_") else 0  # module and class
        shown = ", ".join(".".join(value.split(".")[-parts:]) for value in values)
        if values and shown != "None":
            rows.append((key.removesuffix("._target_"), shown))
    caption = "All settings are in each run's config.yaml."
    differing = tables.settings_table(section.layout)
    table = Table(pd.DataFrame(rows, columns=["setting", "value"]), caption, words=2)
    return [Heading(3, "Settings"), table, *([differing] if differing else [])]
