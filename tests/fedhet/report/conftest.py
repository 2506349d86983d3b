"""Fixtures of these tests."""

import pytest

from fedhet.report import layer_plots, update_agreement
from fedhet.report.blocks import Chart
from fedhet.report.colors import keys_of
from fedhet.report.layout import automatic_layout
from tests.finished_runs import finished_run, no_pictures, write_run

__all__ = ["finished_run", "no_pictures", "write_run"]


@pytest.fixture
def section_of(monkeypatch, tmp_path):
    """Return a function: the blocks that a section has for runs, and the panels by kind.

    Nothing is drawn.
    """

    def blocks_and_panels(section, runs, *options):
        drawn = {}

        def gallery(panels, caption, stem, kinds):
            drawn.update(dict.fromkeys(kinds.values(), panels))
            return Chart(caption, {})

        for module in (layer_plots, update_agreement):
            monkeypatch.setattr(module, "gallery", gallery)
        layout = automatic_layout(runs)
        keys = keys_of(list(layout.methods.items()))
        return section(layout, keys, *options, tmp_path / "report"), drawn

    return blocks_and_panels
