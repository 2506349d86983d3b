"""The tables of docs/robust.md are those of the runs that are stored beside the benchmark."""

import pytest

from benchmarks import robust, robust_alarms, robust_costs
from benchmarks.harness import FOLDER, ROOT

TABLES = {
    "robust_digits.json": robust.markdown,
    "robust_mnist.json": robust.markdown,
    "robust_payloads.json": robust.markdown,
    "robust_payloads.json, damage": robust.damage,
    "robust_alarms.json": robust_alarms.markdown,
    "robust_costs.json": robust_costs.markdown,
}


@pytest.mark.parametrize("source", TABLES)
def test_a_table_of_the_page_is_that_of_the_stored_runs(source):
    page = (ROOT / "docs" / "robust.md").read_text(encoding="utf-8")
    marker = f"<!-- benchmarks/{source} -->\n"
    assert page.count(marker) == 1
    table = TABLES[source](FOLDER / source.partition(",")[0])
    assert page.partition(marker)[2].startswith(table)
