"""The tables of docs/robust.md are those of the runs that are stored beside the benchmark."""

import pytest

from benchmarks import robust, robust_costs
from benchmarks.harness import FOLDER, ROOT

TABLES = {"digits": robust.markdown, "costs": robust_costs.markdown}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_of_the_page_is_that_of_the_stored_runs(name):
    page = (ROOT / "docs" / "robust.md").read_text(encoding="utf-8")
    marker = f"<!-- benchmarks/robust_{name}.json -->\n"
    assert page.count(marker) == 1
    table = TABLES[name](FOLDER / f"robust_{name}.json")
    assert page.partition(marker)[2].startswith(table)
