"""A published table: selection, differences, and what is wrong with a description."""

import pytest

from fedhet.report.page import legend_keys
from fedhet.report.published_tables import paper_layout, read_paper
from fedhet.report.statistics import Figure
from fedhet.report.tables import main_table, target_tables
from tests.refused import refused

NODE = {
    "source": "Somebody et al., Table 1",
    "metric": "accuracy",
    "unit": "%",
    "columns": {"alpha 0.1": {"partition.alpha": 0.1}, "alpha 1": {"partition": {"alpha": 1.0}}},
    "rows": {
        "FedAvg": {"runs": {"strategy": "fedavg"}, "published": [49.0, 70.0]},
        "SCAFFOLD": {"runs": {"strategy": "scaffold"}, "published": [[60.5, 0.2], None]},
        "FedDyn": {"runs": {"strategy": "feddyn"}, "not_run": "not built", "published": [64, "x"]},
        "Centralised": {"runs": None, "published": [80, 80]},
    },
}


def node(**changes):
    return {**NODE, **changes}


def rows_of(**published):
    return {
        name: {"runs": {"strategy": name.lower()}, "published": numbers}
        for name, numbers in published.items()
    }


@pytest.fixture
def runs(finished_run):
    """FedAvg at alpha 0.1: finals 0.5, 0.6; SCAFFOLD one seed at each alpha."""
    return [
        finished_run("fedavg", 0, (0.1, 0.5)),
        finished_run("fedavg", 1, (0.1, 0.6)),
        finished_run("scaffold", 0, (0.1, 0.605)),
        finished_run("scaffold", 0, (0.1, 0.9), partition__alpha=1),
    ]


def texts(table):
    return {row[0].text: [(e.text, e.under) for e in row[1:]] for row in table.rows}


def table_of(runs, node):
    paper = read_paper(node)
    return main_table(paper_layout(runs, paper), paper.figure)


def test_rows_that_were_not_run_take_no_colour_from_those_that_were(finished_run):
    names = ["FedAvg", *[f"Fed{letter}" for letter in "ABCDEFG"], "FedDW"]
    runs = [finished_run(name.lower(), 0, (0.1, 0.5)) for name in (names[0], names[-1])]
    paper = read_paper(node(rows=rows_of(**{name: [1, 2] for name in names})))
    layout = paper_layout(runs, paper)
    assert list(layout.rows) == names
    keys = legend_keys([layout])
    drawn = [(keys[name].color, keys[name].style) for name in (names[0], names[-1])]
    assert drawn == [(0, 0), (1, 1)]  # not sky blue beside blue, both solid
    assert keys.keys() == set(names)


def test_ours_beside_the_papers_and_the_difference(runs):
    """FedAvg: mean 55, sample sd sqrt(2 * 5^2 / 1) = 7.07, difference 55 - 49 = 6."""
    table = table_of(runs, NODE)
    assert table.head == ["method", "alpha 0.1", "alpha 1"]
    assert texts(table) == {
        "FedAvg": [("55.00 ± 7.07 (n = 2)", "paper 49 (+6.0)"), ("not run", "paper 70")],
        "SCAFFOLD": [("60.50 (n = 1)", "paper 60.5 ± 0.2 (+0.0)"), ("90.00 (n = 1)", "")],
        "FedDyn": [("not run", "paper 64"), ("not run", "paper x")],
        "Centralised": [("not run", "paper 80"), ("not run", "paper 80")],
    }
    assert table.rows[2][0].under == "not built"
    assert "ours minus it" in table.caption
    table = table_of(runs[2:], node(rows=rows_of(SCAFFOLD=[61, 95])))
    assert texts(table)["SCAFFOLD"] == [("60.50", "paper 61 (-0.5)"), ("90.00", "paper 95 (-5.0)")]
    assert "n = 1" in table.caption


def test_rounds_to_a_target_beside_the_papers(runs):
    """FedAvg reaches 0.55 in one of two runs: no difference to a bound."""
    rows = rows_of(FedAvg=[15, "100+"], SCAFFOLD=[9, None])
    paper = node(metric="rounds_to", target=0.55, unit=None, rows=rows)
    assert texts(table_of(runs, paper)) == {
        "FedAvg": [("> 1 (1 of 2 reached) (n = 2)", "paper 15"), ("not run", "paper 100+")],
        "SCAFFOLD": [("1 (n = 1)", "paper 9 (-8.0)"), ("1 (n = 1)", "")],
    }
    assert read_paper(paper).shown_targets == (0.55,)
    first, second = target_tables(paper_layout(runs, read_paper(paper)), [0.55], None)
    assert first.head == ["method", "rounds to 55 %", "MB to 55 %"]
    assert texts(second) == {"SCAFFOLD": [("1", ""), ("3", "")]}


def test_numbers_to_another_target_have_no_difference(runs):
    keys = {"metric": "rounds_to", "target": 0.5, "published_target": 0.66, "unit": None}
    keys["rows"] = rows_of(FedAvg=[49, None])
    table = table_of(runs[:2], node(**keys))
    assert texts(table)["FedAvg"] == [("1.0 ± 0.0", "paper 49 to 66 %"), ("not run", "")]
    # with one target, ``targets`` are those of the page's other table
    paper = read_paper(node(**keys, targets=[0.4, 0.5]))
    assert (paper.figure.target, paper.shown_targets) == (0.5, (0.4, 0.5))
    assert paper.published("FedAvg")[0][0].text == "49 to 66 %"


def test_rounds_to_several_targets_beside_the_papers(runs):
    """FedAvg reaches 0.45 in round 1 with both seeds, and 0.55 with one; the paper never."""
    rows = rows_of(FedAvg=[[15, "∞"], [4, None]], FedX=[None, [8, 9]])
    table = table_of(runs[:2], node(metric="rounds_to", targets=[0.45, 0.55], unit=None, rows=rows))
    assert texts(table) == {
        "FedAvg to 45 %": [("1.0 ± 0.0", "paper 15 (-14.0)"), ("not run", "paper 4")],
        "FedX to 45 %": [("not run", ""), ("not run", "paper 8")],
        "FedAvg to 55 %": [("> 1 (1 of 2 reached)", "paper ∞"), ("not run", "")],
        "FedX to 55 %": [("not run", ""), ("not run", "paper 9")],
    }
    assert table.caption.startswith("Rounds to 45 %, 55 %. Mean")


def test_targets_are_chosen_for_each_column_above_the_initial_model(runs, finished_run):
    """Best mean at alpha 1 is 0.9: targets 45, 72 and 85 %; of 0.2, 10 % is where it starts."""
    _, second = target_tables(paper_layout(runs, read_paper(NODE)), [], None)
    assert second.head[1:4] == ["rounds to 45 %", "rounds to 72 %", "rounds to 85 %"]
    assert "targets 45 %, 72 %, 85 %: of 50, 80 and 95 %" in second.caption
    layout = paper_layout([finished_run("fedavg", 0, (0.1, 0.2))], read_paper(NODE))
    (table,) = target_tables(layout, [], None)
    assert table.head[1:3] == ["rounds to 16 %", "rounds to 19 %"]


def test_other_methods_get_rows_and_runs_outside_all_columns_are_named(runs, finished_run):
    others = [finished_run("fedadam", 0), finished_run(name="lost", partition__alpha=5.0)]
    layout = paper_layout([*runs, *others], read_paper(NODE))
    assert layout.cells[-1].row == "FedAdam (not in the paper's table)"
    assert layout.cells[-1].published == ()
    assert layout.notes == ("In no column of the paper's table, and so not shown: lost.",)


def test_a_cell_whose_runs_differ_is_split_not_averaged(finished_run):
    runs = [finished_run("fedavg", 0, (0.1, 0.5), local__lr=lr) for lr in (0.05, 0.1)]
    shown = texts(table_of(runs, NODE))
    assert list(shown)[:2] == ["FedAvg, lr 0.05", "FedAvg, lr 0.1"]
    assert shown["FedAvg, lr 0.1"][0] == ("50.00", "paper 49 (+1.0)")
    assert "local.lr" in paper_layout(runs, read_paper(NODE)).notes[0]


def test_late_accuracy_is_of_as_many_evaluations_as_the_node_says(runs):
    late = node(metric="late_accuracy")
    assert [read_paper(each).figure.evaluations for each in (late, {**late, "evaluations": 2})] == [
        *(5, 2)
    ]
    table = table_of(runs, {**late, "evaluations": 2})
    assert table.caption.startswith("Mean accuracy of the last 2 evaluations (%)")


def test_runs_with_fewer_rounds_than_the_papers_are_said(runs):
    assert read_paper(node(round=1)).figure == Figure("accuracy", percent=True, last_round=1)
    assert paper_layout(runs, read_paper(node(round=1))).notes == ()
    few = paper_layout(runs, read_paper(node(round=80)))
    assert few.notes == ("The paper's numbers are after 80 rounds; the runs have 3.",)


TARGETS = {"metric": "rounds_to", "targets": [0.4, 0.5]}


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"metrik": 1}, "paper.metrik"),
        ({"metric": "f1"}, "paper.metric"),
        ({"metric": "rounds_to"}, "target"),
        ({"unit": "percent"}, "paper.unit"),
        ({"round": 0}, "paper.round"),
        ({"metric": "late_accuracy", "evaluations": 0}, "paper.evaluations"),
        ({"evaluations": 10}, "evaluations"),
        ({"columns": {}}, "paper.columns"),
        ({"rows": rows_of(A=[1])}, "rows.A.published"),
        ({"rows": rows_of(A=[1, [2]])}, "rows.A.published"),
        ({"rows": {"A": {"run": {}, "published": [1, 2]}}}, "paper.rows.A.run"),
        ({**TARGETS, "rows": rows_of(A=[1, 2])}, "rows.A.published"),
        ({**TARGETS, "target": 40}, "paper.target"),
    ],
)
def test_what_is_wrong_with_a_description_names_its_key(changes, key):
    with refused(key):
        read_paper(node(**changes))
