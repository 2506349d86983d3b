"""fedhet-report: tables, curves and one page from finished runs.

    fedhet-report SWEEP [SWEEP ...]

SWEEP is the folder of a sweep or of a run, or a data file of an earlier report. The report goes
into SWEEP/report, or into --out: report.html (one file, which fetches nothing), report.md, every
picture as PNG and SVG, and report.json, the data that the page is made from. fedhet-watch SWEEP
shows the same page while runs go on.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedhet.commands import parser_of, reported_errors, table_console
from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text, writable_folder
from fedhet.conf.experiments import experiment_files, read_experiment
from fedhet.report.blocks import Block, Chart, Heading, Listing, Paragraph, Table
from fedhet.report.by_site import ANSWERS, BY_SITE, CROSS_SITE
from fedhet.report.data_file import ReportData, thinned, to_text
from fedhet.report.page import build_page, layouts_of
from fedhet.report.paper_figures import with_figures
from fedhet.report.partitions import with_partitions
from fedhet.report.render import to_html, to_markdown
from fedhet.report.sources import read_sources

# Headings whose tables the terminal shows, too.
SHOWN = ("Ranking", "All settings", BY_SITE, CROSS_SITE, ANSWERS)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command on ``words``, by default those of the command line."""
    options = _parser().parse_args(words)
    with reported_errors("fedhet-report"):
        data = _with_options(read_sources(options.sources), options)
        data = replace(data, runs=with_figures(data.runs, layouts_of(data), _say))
        source = options.sources[0]
        folder = options.out or (source.parent if source.is_file() else source / "report")
        blocks = write_report(data, folder, options.name, partitions=not options.no_partitions)
        console = table_console()
        show(blocks, console)
        path = folder / f"{options.name}.html"
        console.print(f"report   {path}", soft_wrap=True, highlight=False, markup=False)


def _say(text: str) -> None:
    Console(stderr=True).print(f"{text} ...", markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-report", __doc__)
    add = parser.add_argument
    sources = "folder of a sweep or run, or data file"
    add("sources", nargs="+", type=Path, metavar="SWEEP", help=sources)
    add("--out", type=Path, metavar="DIR", help="the report's folder")
    add("--name", default="report", help="beginning of the files' names (report)")
    add("--title", default="", help="of the page")
    targets = (
        "accuracies in (0, 1] for rounds and bytes to a target (default: the paper's, or 50, 80 "
        "and 95 %% of the best)"
    )
    add("--targets", nargs="+", type=_share, default=[], metavar="ACCURACY", help=targets)
    by = "keys whose values make the columns, such as partition.alpha (default: those that vary)"
    baseline = "the method or row that others are compared with (FedAvg, or else the first row)"
    add("--baseline", default="", metavar="METHOD", help=baseline)
    add("--by", nargs="+", default=[], metavar="KEY", help=by)
    experiment = "lay the runs out as this experiment does, such as fedpvr/table2_cifar10"
    add("--experiment", metavar="NAME", type=_paper_node, help=experiment)
    add("--no-partitions", action="store_true", help="leave out who holds which classes")
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not an accuracy in (0, 1]; 30 % is 0.3")
    return value


def _paper_node(name: str) -> dict[str, object]:
    files = experiment_files()
    if name not in files:
        raise argparse.ArgumentTypeError(f"{name} is unknown; allowed: {', '.join(files)}")
    node = read_experiment(files[name]).get("paper")
    if not isinstance(node, dict):
        raise argparse.ArgumentTypeError(f"{files[name]} has no paper node")
    return node


def _with_options(data: ReportData, options: argparse.Namespace) -> ReportData:
    if options.experiment is not None:
        data = replace(data, runs=[replace(run, paper=options.experiment) for run in data.runs])
    keys = sorted({key for run in data.runs for key in run.settings})
    if unknown := [key for key in options.by if key not in keys]:
        raise ConfigError(f"--by {unknown[0]} is unknown; the runs' keys are: {', '.join(keys)}")
    title, targets = options.title or data.title, options.targets or data.targets
    baseline, by = options.baseline or data.baseline, options.by or data.by
    return replace(data, title=title, targets=targets, baseline=baseline, by=by)


def write_report(
    data: ReportData, folder: Path, name: str = "report", *, partitions: bool = True
) -> list[Block]:
    """Write the page, its pictures and its data into a folder; return the page.

    ``name`` begins the files' names. With ``partitions``, the page shows the clients' classes.
    """
    writable_folder(folder, "--out ")
    data = thinned(with_partitions(data) if partitions else data)
    blocks = build_page(data, folder, name)
    for block in blocks:
        if isinstance(block, Chart):
            block.save(folder)
    kept = to_text(data)
    for ending, text in (("json", kept), ("md", to_markdown(blocks)), ("html", to_html(blocks))):
        save_text(folder / f"{name}.{ending}", text)
    return blocks


def show(blocks: Sequence[Block], console: Console) -> None:
    """Print the verdict, the warnings, and those tables that have a heading of ``SHOWN``."""
    heading = Heading(1, "")
    for block in blocks:
        if isinstance(block, Heading):
            heading = block
        elif isinstance(block, Paragraph) and block.warning:
            console.print(f"note: {block.text}", style="yellow", markup=False)
        elif isinstance(block, Listing) and block.kind == "verdict":
            console.print("\n".join(block.items), markup=False, highlight=False)
        elif isinstance(block, Table) and heading.text in SHOWN:
            console.print(f"\n{heading.text}", style="bold", markup=False)
            console.print(rich_table(block))


def rich_table(table: Table) -> RichTable:
    """Return a table for the terminal."""
    shown = RichTable(caption=table.caption, caption_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(table.head):
        justify: Literal["left", "right"] = "left" if number < table.words else "right"
        shown.add_column(Text(name), justify=justify, overflow="fold")
    for row in table.rows:
        shown.add_row(*(Text(f"{e.text}\n{e.under}" if e.under else e.text) for e in row))
    return shown


if __name__ == "__main__":
    main()
