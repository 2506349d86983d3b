"""Fixtures of these tests."""

import pytest

from fedhet.report import layer_plots, update_agreement
from fedhet.report.blocks import Picture
from tests.finished_runs import finished_run, no_pictures, write_run

__all__ = ["finished_run", "no_pictures", "write_run"]


@pytest.fixture
def drawn(monkeypatch):
    """Return the panels that galleries would draw, by the picture's kind."""
    found = {}

    def keep(panels, caption, stem, kind, abreast):
        found[kind] = panels
        return Picture("", caption, f"{stem.name}_{kind}")

    monkeypatch.setattr(layer_plots, "gallery", keep)
    monkeypatch.setattr(update_agreement, "gallery", keep)
    return found
