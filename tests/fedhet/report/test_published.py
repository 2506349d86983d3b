"""The data files in docs/results still make their pages."""

from pathlib import Path

import pytest

from fedhet.report.data_file import parse, read_data, to_text
from fedhet.report.markdown import to_markdown
from fedhet.report.page import build_page

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"
FILES = [p.name for p in sorted(RESULTS.glob("*.json")) if "fedhet_report" in p.read_text()[:99]]
QUICK = ("feddw_figure4.json", "fedpvr_short.json", "maecho_figure5.json")
pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FILES]
)
def test_a_published_data_file_makes_its_page(name, tmp_path):
    data = read_data(RESULTS / name)
    assert parse(to_text(data), name) == data
    assert all(run.status == "completed" for run in data.runs)
    made = to_markdown(build_page(data, lambda: data.partitions, tmp_path, "report"))
    assert "± nan" not in made
    if name == "fedpvr_short.json":  # the table in fedpvr.md
        written = (RESULTS / "fedpvr.md").read_text()
        for start, numbers in (
            ("0.1 | FedAvg", "11 | 19 | 69.5 | 120.0"),
            ("0.1 | SCAFFOLD", "13 | 21 | 164.3 | 265.3"),
            ("0.1 | FedPVR", "11 | 17 | 70.1 | 108.4"),
            ("0.5 | FedAvg", "5 | 12 | 31.6 | 75.8"),
            ("0.5 | SCAFFOLD", "4 | 9 | 50.5 | 113.7"),
            ("0.5 | FedPVR", "4 | 9 | 25.5 | 57.4"),
        ):
            assert f"{start[4:]} | {numbers} |" in made
            line = next(x for x in written.splitlines() if x.startswith(f"| {start} |"))
            assert line.endswith(f"| {numbers} |")
