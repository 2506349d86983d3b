"""Every number of docs/results that has stored data is what the data give."""

import json

import pytest

from benchmarks.comparison_page import summarised
from tests.docs.stored import (
    PAGES,
    ROOT,
    Query,
    Wrong,
    is_rounded,
    query_of,
    tables_of,
    wrong_cell,
    wrong_cells,
    wrong_prose,
)

PATHS = sorted(path for path in PAGES.glob("*.md") if path.name != "README.md")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)
def test_a_page_prints_what_the_stored_data_give(path):
    tables = [table for table in tables_of(path) if table.source.startswith("from: ")]
    wrong = [f"{table.heading}: {cell}" for table in tables for cell in wrong_cells(table)]
    assert not wrong + wrong_prose(path)


def test_every_table_names_its_source_or_is_listed_as_not_recomputed():
    (*_, listed) = tables_of(PAGES / "README.md")
    named = {(row[0].partition("]")[0][1:], row[1]) for row in listed.rows}
    without = {(t.page, t.heading) for path in PATHS for t in tables_of(path) if not t.source}
    assert named == without


@pytest.mark.slow
def test_the_comparisons_ranks_and_intervals_are_those_of_its_runs():
    stored = json.loads((ROOT / "benchmarks" / "comparison.json").read_text(encoding="utf-8"))
    for name, found in summarised(stored).items():
        assert found == stored[name]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("40.8", "method=fedpvr partition.alpha=.5 best_accuracy"),  # 40.9 in the table
        ("12 (84)", "method=fedpvr partition.alpha=.5 rounds_to:.35 bytes_to:.35"),  # 13 (83)
        ("9", "method=fedpvr partition.alpha=.1 rounds_to:.4"),  # not reached
        ("-", "method=fedpvr partition.alpha=.1 rounds_to:.25"),
    ],
)
def test_a_wrong_cell_is_found(cell, words):
    assert wrong_cell(query_of(f"fedpvr_reduced.json {words}"), cell)


@pytest.mark.slow
def test_a_difference_is_of_pairs_of_equal_seeds():
    """58.79, 51.53, 62.75 and 60.64, 51.16, 63.04 of the page's first table, by hand."""
    words = "feddw_table1.json name=c10_path_* method=feddw best_accuracy [] less method=fedavg"
    mean, low, high = query_of(words).numbers()
    assert mean == pytest.approx((1.85 - 0.37 + 0.29) / 3)
    half = 4.302653 * 1.14 / 3**0.5  # t of 2 degrees of freedom, spread of the three
    assert (high - low) / 2 == pytest.approx(half, rel=1e-4)


def test_rounding_is_to_the_printed_digits():
    assert is_rounded("40.9", 40.949)
    assert not is_rounded("40.9", 40.96)
    assert is_rounded("1,134", 1134.4)


def test_runs_that_nobody_has_are_an_error():
    with pytest.raises(Wrong, match="no record"):
        query_of("fedpvr_reduced.json method=fedsgd accuracy").numbers()
    with pytest.raises(Wrong, match="names no figure"):
        wrong_cell(Query(), "1")
