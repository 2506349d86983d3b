"""Reading results directories, whole and broken ones, and the report's data file."""

import dataclasses
import json

import pytest

from fedhet.common.results import read_rows, write_rows
from fedhet.report import data_file
from fedhet.report.data_file import Origin, Partition, ReportData, merged, parse, thinned, to_text
from fedhet.report.run_data import Run, columns_of, find_runs, read_run
from fedhet.report.statistics import Figure
from tests.refused import refused


def test_a_whole_run(finished_run):
    run = finished_run("scaffold", 3, (0.1, 0.5))
    assert (run.method, run.seed, run.status, run.error) == ("scaffold", 3, "completed", "")
    assert run.settings["partition.alpha"] == 0.1
    assert run.points("accuracy") == [(0, 0.1), (1, 0.5)]
    assert run.points("unheard_of") == []
    assert run.points("clients") == [(1, 2)]  # how many ids there are
    assert "failures" not in run.columns
    assert run.spent("bytes")[1] == 3_000_000


def test_an_incomplete_last_line_is_left_out_and_a_missing_summary_means_unfinished(write_run):
    folder = write_run("fedprox", 1)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "accu')
    run = read_run(folder, "a", 0)
    assert run.status == "completed"
    assert run.columns["round"] == [0, 1, 2, 3]
    (folder / "summary.json").unlink()
    run = read_run(folder, "a", 0)
    assert (run.method, run.seed, run.status) == ("fedprox", 1, "unfinished")
    assert "it has no summary.json" in run.error
    assert len(run.points("accuracy")) == 4


def test_refused_replies_have_their_round(write_run):
    folder = write_run()
    rows = read_rows(folder / "metrics.jsonl")
    rows[2]["failures"] = ["client 7: update holds NaN"]
    write_rows(folder / "metrics.jsonl", rows)
    assert read_run(folder, "a", 0).refusals == ["round 2: client 7: update holds NaN"]


def test_runs_are_found_in_the_order_of_their_numbers(write_run, tmp_path):
    for number in (0, 10, 9, 2):
        write_run(name=f"{number}_fedavg")
    sweep = tmp_path / "sweep"
    for beside in ("report", "checkpoints"):
        (sweep / beside).mkdir()
        (sweep / beside / "summary.json").touch()
    (sweep / "log.txt").touch()
    (sweep / "3_fedavg").mkdir()  # it failed before it wrote results
    (sweep / "3_fedavg" / "log.txt").touch()
    (sweep / "2_fedavg" / "up").symlink_to(sweep)  # a loop
    (sweep / "linked").mkdir()
    (sweep / "linked" / "again").symlink_to(sweep)
    found = [folder.name for folder in find_runs(sweep)]
    assert found == ["0_fedavg", "2_fedavg", "3_fedavg", "9_fedavg", "10_fedavg"]
    assert list(find_runs(sweep / "2_fedavg")) == [sweep / "2_fedavg"]


# ---- the data file -------------------------------------------------------------------------------


def test_what_is_written_is_read_again_and_shared_settings_are_written_once(finished_run):
    paper = {"source": "Table 1"}
    failed = finished_run("scaffold", 0, summary={"status": "failed", "error": "no"})
    runs = [finished_run("fedavg", seed, columns={"lr": 0.1}, paper=paper) for seed in (0, 1)]
    partition = Partition("digits", {"clients": 2}, ["a", "b"], [[1, 2], [3, 4]], 2)
    origin = Origin("s", "fedhet -m", ["7: no"])
    runs += [failed, Run("bare", 0, "unknown", None, "unfinished")]
    data = ReportData(runs, [origin], [partition], "T", [0.5], ["x"])
    text = to_text(data)
    read = parse(text, "it")
    assert to_text(read) == text
    assert read.runs == [dataclasses.replace(r, refusals=list(r.refusals)) for r in runs]
    assert dataclasses.replace(read, runs=runs) == data
    content = json.loads(text)
    assert (content["common"]["clients"], len(content["papers"])) == (10, 1)
    assert not {"clients", "figures"} & {*content["runs"][0], *content["runs"][0]["settings"]}
    assert content["runs"][0]["columns"]["lr"] == {"first": None, "rest": 0.1, "count": 4}
    both = merged([data, read])
    assert [run.source for run in both.runs] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (len(both.origins), both.title) == (2, "T")


WHOLE = ["simulated_seconds", "elapsed_seconds", "loss", "client_loss", "client_accuracy"]


@pytest.mark.slow
def test_many_rounds_are_thinned_but_not_what_tables_and_axes_are_of():
    rounds = list(range(1001))
    columns = {"round": rounds}
    for number, name in enumerate(["accuracy", "bytes_up", "train_loss", "norm_ratio", *WHOLE]):
        columns[name] = [float(i + number) for i in rounds]
    runs = [Run(str(i), 0, "m", i, "completed", columns=columns) for i in range(20)]
    assert sum(len(c) for run in runs for c in run.columns.values()) > 2 * data_file.MOST_POINTS
    found = thinned(ReportData(runs))
    assert found.every == 6
    one = found.runs[0]
    assert all(one.points(name) == runs[0].points(name) for name in WHOLE)
    assert one.points("accuracy") == runs[0].points("accuracy")
    assert one.spent("bytes") == runs[0].spent("bytes")
    assert [round for round, _ in one.points("train_loss")] == [*range(0, 1001, 6), 1000]
    late = [round for round, _ in one.points("norm_ratio")]  # a table has the mean of the last ten
    assert late == [*range(0, 991, 6), *range(991, 1001)]
    assert to_text(thinned(parse(to_text(found), "it"))) == to_text(found)
    assert thinned(ReportData(runs[:2])).every == 1
    more = thinned(merged([found, ReportData(runs[:5])]))  # whose step goes with that of the first
    for run in (more.runs[0], more.runs[-1]):
        assert [at for at, _ in run.points("train_loss")] == [*range(0, 1001, 12), 1000]
    seconds = Figure("seconds_to", 7.0)  # reached in round 7, which is thinned out of the others
    assert seconds.of(one) == seconds.of(runs[0]) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"runs": [{}]},
        {"runs": None},
        {"origins": [{"x": 1}]},
        {"papers": [], "runs": [{"settings": {}, "paper": 3, "columns": {}}]},
        {"runs": 7},
    ],
)
def test_a_data_file_that_was_damaged_by_hand_is_said_to_be(tmp_path, changed):
    whole = {"fedhet_report": 2, "papers": [], "common": {}, "runs": [], "origins": []}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(whole | {"partitions": []} | changed))
    with refused("x.json"):
        data_file.read_data(path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"fedhet_report": 1}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with refused("x.json"):
        data_file.read_data(path)


def test_a_round_without_an_alarm_has_none_where_another_has_some():
    rows = [{"round": 0}, {"round": 1}, {"round": 2, "alarms": 2}, {"round": 3}]
    assert columns_of(rows)["alarms"] == [None, 0, 2, 0]
    assert "alarms" not in columns_of(rows[:2])
