"""The data file."""

import dataclasses
import json

import pytest

from fedhet.report.data_file import (
    MOST_POINTS,
    DataError,
    Origin,
    Partition,
    ReportData,
    merged,
    parse,
    read_data,
    thinned,
    thinning,
    to_text,
)
from fedhet.report.run_data import Run, read_run


@pytest.fixture
def data(write_run):
    paper = {"source": "Table 1"}
    folders = [
        write_run("fedavg", 0, columns={"lr": 0.1}, paper=paper),
        write_run("fedavg", 1, columns={"lr": 0.1}, partition__alpha=1.0, paper=paper),
        write_run("scaffold", 0, summary={"status": "failed", "error": "no"}),
    ]
    runs = [read_run(folder, folder.name, 0) for folder in folders]
    partition = Partition("digits", {"clients": 2}, ("a", "b"), ((1, 2), (3, 4)), 2)
    return ReportData(runs, [Origin("s", "fedhet -m", ["7: no"])], [partition], "T", [0.5], ["x"])


def test_what_is_written_is_read_again(data):
    read = parse(to_text(data), "it")
    assert to_text(read) == to_text(data)
    for before, after in zip(data.runs, read.runs, strict=True):
        assert dict(after.settings) == dict(before.settings)
        assert {k: list(v) for k, v in after.columns.items()} == before.columns
        assert after.summary == before.summary
        assert after.paper == before.paper
        assert (after.name, after.status, after.error) == (before.name, before.status, before.error)
    assert read.origins == data.origins
    assert read.partitions[0].counts == [[1, 2], [3, 4]]
    assert (read.title, read.targets, read.by) == ("T", [0.5], ["x"])


def test_settings_that_all_share_and_columns_that_stay_are_written_once(data):
    content = json.loads(to_text(data))
    assert content["common"]["clients"] == 10
    assert "clients" not in content["runs"][0]["settings"]
    assert content["runs"][1]["settings"]["partition.alpha"] == 1.0
    assert content["runs"][0]["columns"]["lr"] == {"first": None, "rest": 0.1, "count": 4}
    assert len(content["papers"]) == 1


def test_a_run_without_a_recipe_does_not_take_the_others(data):
    bare = Run("bare", 0, "unknown", None, "unfinished")
    read = parse(to_text(dataclasses.replace(data, runs=[*data.runs, bare])), "it")
    assert read.runs[-1].settings == {}
    assert read.runs[0].settings["clients"] == 10


def test_many_rounds_are_thinned_but_not_accuracy_and_bytes():
    rounds = list(range(1001))
    columns = {
        name: [float(i + number) for i in rounds]
        for number, name in enumerate(["accuracy", "bytes_up", "train_loss", "norm_ratio"])
    }
    runs = [
        Run(str(i), 0, "m", i, "completed", columns={"round": rounds, **columns}) for i in range(20)
    ]
    assert sum(len(c) for run in runs for c in run.columns.values()) > 2 * MOST_POINTS
    assert thinning(runs) == 3
    one = thinned(runs, 3)[0]
    assert one.points("accuracy") == runs[0].points("accuracy")
    assert one.bytes_until(1000) == runs[0].bytes_until(1000)
    kept = [round for round, _ in one.points("train_loss")]
    assert kept == [*range(0, 1001, 3), 1000]
    late = [round for round, _ in one.points("norm_ratio")]  # the mean of ten is in a table
    assert late == [*range(0, 991, 3), *range(991, 1001)]
    assert to_text(parse(to_text(ReportData(runs)), "it")) == to_text(ReportData(runs))
    assert thinning(runs[:2]) == 1
    assert parse(to_text(ReportData(runs)), "it").every == 3


def test_a_table_of_the_papers_size_is_a_small_file():
    """48 runs of 80 rounds with 12 columns that vary, as a table of FedPVR has them."""
    rounds = list(range(81))
    columns = {f"c{n}": [round(0.1234567 * (n + i), 6) for i in rounds] for n in range(12)}
    runs = [
        Run(
            str(i), 0, "m", i, "completed", columns={"round": rounds, "accuracy": rounds, **columns}
        )
        for i in range(48)
    ]
    assert len(to_text(ReportData(runs))) < 500_000


def test_several_sources_are_put_together(data):
    both = merged([data, parse(to_text(data), "it")])
    assert len(both.runs) == 6
    assert [run.source for run in both.runs] == [0, 0, 0, 1, 1, 1]
    assert len(both.origins) == 2
    assert both.title == "T"


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"fedhet_report": 99}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"x\.json is no data file of fedhet-report"):
        read_data(path)
