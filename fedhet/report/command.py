"""fedhet-report: tables, curves and one page from finished runs.

    fedhet-report SWEEP [SWEEP ...]

SWEEP is the folder of a sweep or of a run, or a data file that fedhet-report has written. Written
are, into SWEEP/report unless --out names another folder: report.html (one file, pictures included),
report.md, every picture as PNG and SVG, and report.json, the data that the page is made from.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from conf import FOLDER
from fedhet.commands import parser_of, say_error, table_console
from fedhet.report.blocks import Block, Entry, Heading, Table, Warn
from fedhet.report.class_counts import Counting
from fedhet.report.data_file import ReportData, parse, to_text
from fedhet.report.html import to_html
from fedhet.report.markdown import to_markdown
from fedhet.report.page import build_page
from fedhet.report.provenance import PARTS
from fedhet.report.sources import DataError, SourceError, read_sources


def main(words: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        words: the command line; None: the process's.
    """
    options = _parser().parse_args(words)
    try:
        data = _with_options(read_sources(options.sources, _say), options)
    except (DataError, SourceError) as error:
        say_error("fedhet-report", error)
        raise SystemExit(2) from None
    folder = options.out or _default_folder(options.sources[0])
    blocks = write_report(data, folder, options.name, partitions=not options.no_partitions)
    console = table_console()
    _show(blocks, console)
    console.print(f"report   {folder / options.name}.html", soft_wrap=True, highlight=False)


def _say(text: str) -> None:
    Console(stderr=True).print(f"{text} ...", markup=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-report", __doc__)
    add = parser.add_argument
    add(
        "sources",
        nargs="+",
        type=Path,
        metavar="SWEEP",
        help="folder of a sweep or run, or data file",
    )
    add("--out", type=Path, metavar="DIR", help="the report's folder")
    add("--name", default="report", help="how the files' names begin (report)")
    add("--title", default="", help="of the page")
    add(
        "--targets",
        nargs="+",
        type=_share,
        default=[],
        metavar="ACCURACY",
        help="accuracies in (0, 1] for rounds and bytes to a target (by default the paper's, or "
        "50, 80 and 95 %% of the best)",
    )
    add(
        "--by",
        nargs="+",
        default=[],
        metavar="KEY",
        help="keys whose values make the columns, such as partition.alpha (by default those that "
        "vary)",
    )
    add(
        "--experiment",
        metavar="NAME",
        type=_paper_node,
        help="lay the runs out as this one of conf/experiment has it, such as "
        "fedpvr/table2_cifar10",
    )
    add("--no-partitions", action="store_true", help="do not count who holds which classes")
    return parser


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no accuracy in (0, 1]; 30 % is 0.3")
    return value


def _paper_node(name: str) -> dict[str, object]:
    folder = FOLDER / "experiment"
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.yaml"))
        raise argparse.ArgumentTypeError(f"{name} is unknown; there are: {', '.join(known)}")
    node = yaml.safe_load(path.read_text(encoding="utf-8")).get("paper")
    if not isinstance(node, dict):
        raise argparse.ArgumentTypeError(f"{path} has no paper node")
    return node


def _with_options(data: ReportData, options: argparse.Namespace) -> ReportData:
    if options.experiment is not None:
        data = replace(data, runs=[replace(run, paper=options.experiment) for run in data.runs])
    keys = sorted({key for run in data.runs for key in run.settings})
    if unknown := [key for key in options.by if key not in keys]:
        raise SourceError(
            f"--by {unknown[0]} is no key of these runs; theirs are: {', '.join(keys)}"
        )
    return replace(
        data,
        title=options.title or data.title,
        targets=options.targets or data.targets,
        by=options.by or data.by,
    )


def _default_folder(source: Path) -> Path:
    return source.parent if source.is_file() else source / "report"


def write_report(
    data: ReportData, folder: Path, name: str = "report", *, partitions: bool = True
) -> list[Block]:
    """Write the page, its pictures and its data; return the page.

    Args:
        data: what the sources hold.
        folder: where all goes; made where it is not there.
        name: how the files' names begin.
        partitions: count who holds which classes, where that is not known yet.
    """
    folder.mkdir(parents=True, exist_ok=True)
    counting = Counting(data.partitions, data.runs if partitions else ())
    # The page is made from what its data file says, so that it can be made again from the file.
    data = parse(to_text(data), name)
    blocks = build_page(data, counting.result, folder, name)
    data = replace(data, partitions=counting.result())
    (folder / f"{name}.json").write_text(to_text(data), encoding="utf-8")
    (folder / f"{name}.md").write_text(to_markdown(blocks), encoding="utf-8")
    (folder / f"{name}.html").write_text(to_html(blocks), encoding="utf-8")
    return blocks


def _show(blocks: Sequence[Block], console: Console) -> None:
    """Print the warnings, and the table that follows each section's heading."""
    heading = Heading(1, "")
    for block in blocks:
        if isinstance(block, Heading):
            heading = block
        elif isinstance(block, Warn):
            console.print(f"note: {block.text}", style="yellow", markup=False)
        elif isinstance(block, Table) and heading.level == 2 and heading.text not in PARTS:
            console.print(f"\n{heading.text}", style="bold", markup=False)
            console.print(rich_table(block))


def rich_table(table: Table) -> RichTable:
    """Return a table for the terminal."""
    shown = RichTable(caption=table.caption, caption_justify="left", box=SIMPLE_HEAD)
    for number, name in enumerate(table.head):
        justify: Literal["left", "right"] = "left" if number < table.words else "right"
        shown.add_column(Text(name), justify=justify, overflow="fold")
    for row in table.rows:
        shown.add_row(*(_joined(entry) for entry in row))
    return shown


def _joined(entry: Entry) -> Text:
    return Text(f"{entry.text}\n{entry.under}" if entry.under else entry.text)


if __name__ == "__main__":
    main(sys.argv[1:])
