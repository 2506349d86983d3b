"""The data files in docs/results still make their pages."""

import re
from pathlib import Path

import pytest

from fedhet.report.data_file import parse, read_data, to_text
from fedhet.report.names import method_title
from fedhet.report.page import build_page
from fedhet.report.render import to_markdown

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
FILES = [p.name for p in sorted(RESULTS.glob("*.json")) if "fedhet_report" in p.read_text()[:99]]
QUICK = ("feddw_figure4.json", "fedpvr_short.json", "maecho_figure5.json")
WRITTEN = (RESULTS / "fedpvr.md").read_text()
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FILES]
)
def test_a_published_data_file_makes_its_page(name, tmp_path):
    data = read_data(RESULTS / name)
    assert parse(to_text(data), name) == data
    expected = {"completed", "diverged", "stopped", "unfinished"}
    assert {run.status for run in data.runs} <= expected
    made = to_markdown(build_page(data, tmp_path, "report"))
    assert "± nan" not in made
    cut_short = [run for run in data.runs if run.status != "completed"]
    assert all(f"{run.name} | {run.status} |" in made for run in cut_short)
    if name == "fedpvr_short.json":  # the table in fedpvr.md: accuracies, rounds and MB
        rows = re.findall(r"^\| 0\.[15] \| (\w+) \|.*?\|.*?(\|.*)$", WRITTEN, re.MULTILINE)
        assert len(rows) == 6
        assert all(f"{method_title(method)} {figures}" in made for method, figures in rows)
