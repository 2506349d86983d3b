"""Fixtures of these tests."""

import pytest

from fedhet.report import figures
from fedhet.report.blocks import Chart
from fedhet.report.colors import keys_of
from fedhet.report.layout import automatic_layout
from tests.finished_runs import finished_run, no_pictures, write_run

__all__ = ["finished_run", "no_pictures", "write_run"]


@pytest.fixture
def panels(monkeypatch):
    """Return the panels of each picture of a report, by what it is of; nothing is drawn."""
    found = {}

    def gallery(panels, caption, stem, kinds, abreast=3):
        found[next(iter(kinds.values()))] = panels
        return Chart(caption, {}, {}, {"columns": [], "data": []})

    monkeypatch.setattr(figures, "gallery", gallery)
    return found


@pytest.fixture
def section_of(panels, tmp_path):
    """Return a function: the blocks that a section has for runs, and its panels by kind."""

    def blocks_and_panels(section, runs, *options):
        panels.clear()
        layout = automatic_layout(runs)
        keys = keys_of(list(layout.methods.items()))
        return section(layout, keys, *options, tmp_path / "report"), dict(panels)

    return blocks_and_panels
