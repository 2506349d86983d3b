"""The data file."""

import dataclasses
import json

import pytest

from common.errors import ConfigError
from fedhet.report.data_file import (
    MOST_POINTS,
    Origin,
    Partition,
    ReportData,
    merged,
    parse,
    read_data,
    thinned,
    to_text,
)
from fedhet.report.run_data import Run


@pytest.fixture
def data(finished_run):
    paper = {"source": "Table 1"}
    runs = [
        finished_run("fedavg", 0, columns={"lr": 0.1}, paper=paper),
        finished_run("fedavg", 1, columns={"lr": 0.1}, partition__alpha=1.0, paper=paper),
        finished_run("scaffold", 0, summary={"status": "failed", "error": "no"}),
    ]
    runs[1] = dataclasses.replace(runs[1], figures={"feddw": {"relations": {"head": [[1]]}}})
    runs.append(Run("bare", 0, "unknown", None, "unfinished"))
    partition = Partition("digits", {"clients": 2}, ["a", "b"], [[1, 2], [3, 4]], 2)
    return ReportData(runs, [Origin("s", "fedhet -m", ["7: no"])], [partition], "T", [0.5], ["x"])


def test_what_is_written_is_read_again_and_shared_settings_are_written_once(data):
    text = to_text(data)
    assert to_text(parse(text, "it")) == text
    read = parse(text, "it")
    assert read.runs == [dataclasses.replace(r, refusals=list(r.refusals)) for r in data.runs]
    assert dataclasses.replace(read, runs=()) == dataclasses.replace(data, runs=())
    content = json.loads(text)
    assert content["common"]["clients"] == 10
    assert "clients" not in content["runs"][0]["settings"]
    assert content["runs"][0]["columns"]["lr"] == {"first": None, "rest": 0.1, "count": 4}
    assert len(content["papers"]) == 1
    assert "figures" not in content["runs"][0]
    both = merged([data, read])
    assert [run.source for run in both.runs] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert len(both.origins) == 2
    assert both.title == "T"


def test_many_rounds_are_thinned_but_not_accuracy_and_bytes():
    rounds = list(range(1001))
    columns = {
        name: [float(i + number) for i in rounds]
        for number, name in enumerate(["accuracy", "bytes_up", "train_loss", "norm_ratio"])
    }
    columns = {"round": rounds, **columns}
    runs = [Run(str(i), 0, "m", i, "completed", columns=columns) for i in range(20)]
    assert sum(len(c) for run in runs for c in run.columns.values()) > 2 * MOST_POINTS
    found = thinned(ReportData(runs))
    assert found.every == 3
    one = found.runs[0]
    assert one.points("accuracy") == runs[0].points("accuracy")
    assert one.bytes_until(1000) == runs[0].bytes_until(1000)
    assert [round for round, _ in one.points("train_loss")] == [*range(0, 1001, 3), 1000]
    late = [round for round, _ in one.points("norm_ratio")]  # a table has the mean of the last ten
    assert late == [*range(0, 991, 3), *range(991, 1001)]
    assert to_text(thinned(parse(to_text(found), "it"))) == to_text(found)
    assert thinned(ReportData(runs[:2])).every == 1


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"fedhet_report": 99}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.json is not a data file of fedhet-report"):
        read_data(path)


def test_a_data_file_of_format_1_has_the_keys_of_today():
    """Figures of papers were fields of a run, and keys and modules had other names."""
    keys = {"strategy": "fedprox", "strategy.client_sides.fedprox.mu": 0.1}
    rows = {"FedProx": {"runs": keys, "published": [1]}}
    old = {
        "fedhet_report": 1,
        **{"title": "", "targets": [], "by": [], "every": 1, "origins": [], "partitions": []},
        "papers": [{"source": "Table 1", "columns": {"all": {}}, "rows": rows}],
        "common": {"local.solver": "adam"},
        "runs": [
            {
                **{"name": "a", "source": 0, "method": "fedprox", "seed": 0, "status": "completed"},
                **{"error": "", "paper": 0, "summary": {}, "refusals": [], "columns": {}},
                "settings": {"strategy.client_sides.fedprox.mu": 0.1},
                "relations": {"head": [[1]]},
                "neurons": {"layer": "x"},
            }
        ],
    }
    (run,) = parse(json.dumps(old), "it").runs
    assert run.settings["local.optimizer"] == "adam"
    assert run.settings["strategy.fedprox.mu"] == 0.1
    selected = run.paper["rows"]["FedProx"]["runs"]
    assert (selected["strategy"], selected["strategy.fedprox.mu"]) == ("fedprox", 0.1)
    assert run.figures == {
        "feddw": {"relations": {"head": [[1]]}},
        "maecho": {"neurons": {"layer": "x"}},
    }
