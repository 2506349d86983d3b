"""Finds the figures of a single paper: a package of ``reproductions/`` makes them.

An experiment file names the package under ``paper.name``. The package has the two
functions of :class:`PaperFigures`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, cast

from fedhet.report.blocks import Block, Paragraph
from fedhet.report.data_file import Partition
from fedhet.report.layout import Layout, first_runs
from fedhet.report.run_data import Run

Partitions = Sequence[Partition]
Say = Callable[[str], None]


class PaperFigures(Protocol):
    """What a package of ``reproductions/`` exposes."""

    def collect(self, folder: Path, settings: Mapping[str, Any], say: Say) -> dict[str, Any] | None:
        """Return what the figures need of a completed run, as JSON; None if it has nothing.

        The data file keeps it, and ``Run.figures[name]`` holds it. ``settings`` is the recipe with
        dotted keys; ``say`` tells the user what takes long.
        """

    def sections(self, layout: Layout, partitions: Partitions, stem: Path) -> list[Block]:
        """Return the figures of runs that have ``Run.figures[name]``, and save their files.

        ``stem`` is the folder and the beginning of the files' names.
        """


def package(name: str) -> PaperFigures | None:
    """Return the package of this name; None if it is not installed."""
    try:
        return cast(PaperFigures, importlib.import_module(f"fedhet.reproductions.{name}"))
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("fedhet.reproductions"):
            raise
        return None


def with_figures(runs: Sequence[Run], layouts: Sequence[Layout], say: Say) -> list[Run]:
    """Collect the figures of each cell's first seed that has them, and drop those of others."""
    found = {
        id(run): figures
        for layout in layouts
        for _, run, figures in first_runs(layout, lambda run: run.figures or _collected(run, say))
    }
    return [replace(run, figures=found.get(id(run), {})) for run in runs]


def _collected(run: Run, say: Say) -> dict[str, Any]:
    name = _name(run)
    if not name or run.folder is None or (paper := package(name)) is None:
        return {}
    figures = paper.collect(run.folder, run.settings, say)
    return {name: figures} if figures else {}


def _name(run: Run) -> str:
    return str((run.paper or {}).get("name") or "")


def sections(
    runs: Sequence[Run], layout: Layout, partitions: Partitions, stem: Path
) -> list[Block]:
    """Return the figures that packages of ``reproductions/`` make of these runs."""
    names = dict.fromkeys(name for run in runs for name in (*run.figures, _name(run)) if name)
    blocks: list[Block] = []
    for name in names:
        if paper := package(name):
            blocks += paper.sections(layout, partitions, stem)
        else:
            text = f"The paper's own figures are missing: reproductions/{name} is not installed."
            blocks.append(Paragraph(text, warning=True))
    return blocks
