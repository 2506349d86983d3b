"""Every number of docs/results that has stored data is what the data give."""

import re

import pytest

from tests.docs.stored import INLINE, PAGES, Table, is_rounded, tables_of, wrong_cells, wrong_prose

README = (PAGES / "README.md").read_text(encoding="utf-8")
PATHS = sorted(path for path in PAGES.glob("*.md") if path.name != "README.md")


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_page_prints_what_the_stored_data_give(path):
    tables = [table for table in tables_of(path) if table.source.startswith("from: ")]
    wrong = [f"{table.heading}: {cell}" for table in tables for cell in wrong_cells(table)]
    assert not wrong + wrong_prose(path)
