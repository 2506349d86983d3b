"""docs/what-leaves.md lists all that a site sends; the recipe matrix compares every reply."""

import re
from pathlib import Path

import pytest
from flwr.app import Message

from fedhet.conf import catalogue, compose
from fedhet.conf.build import strategy_parts
from fedhet.strategies.wire.records import CATEGORIES, CLIENT, COLUMNS, METRICS, UPDATE
from tests.recipes import TINY, overrides, run_recipe

ROOT = Path(__file__).parents[1]
METHODS = sorted(catalogue.methods())


def tables() -> dict[str, list[list[str]]]:
    """Return the rows of the page's tables by the word at the head of their first column."""
    found: dict[str, list[list[str]]] = {}
    rows: list[list[str]] = []
    for line in (ROOT / "docs" / "what-leaves.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if not line.startswith("|"):
            rows = []
        elif not rows:
            rows = found.setdefault(cells[0], [cells])
        elif not set(line) <= set("|-"):
            rows.append(cells)
    return found


def names(cell: str) -> list[str]:
    """Return what a cell of a table has in code style."""
    return re.findall(r"`([\w-]+)`", cell)


PAYLOADS = {names(row[0])[0]: names(row[1]) for row in tables()["payload"][1:]}
MESSAGES = {row[0].partition(",")[0]: names(row[1]) for row in tables()["message"][1:]}
NUMBERS = {name for row in tables()["name"][1:] for name in names(row[0])}


def replies_of(folder: Path, *words: str) -> list[Message]:
    """Return the replies of three clients in a run of one round; three are to registration."""
    replies: list[Message] = []
    run_recipe(
        folder, *TINY, "rounds=1", *words, tamper=lambda reply: replies.append(reply) or reply
    )
    return replies


def test_the_page_names_only_methods_that_exist():
    assert set(METHODS) >= {method for methods in PAYLOADS.values() for method in methods}


@pytest.mark.slow
def test_personal_models_and_held_out_data_send_only_listed_numbers(tmp_path):
    words = ["strategy=fedrep", "evaluation.model=both", "partition.holdout=0.2"]
    trained = replies_of(tmp_path, *words)[3:]
    sides = strategy_parts(compose(overrides(*words)), 1).client_sides.values()
    assert len(trained) == 3
    for reply in trained:
        assert set(reply.content) - {UPDATE, METRICS} == {name for s in sides for name in s.sends}
        assert set(reply.content[METRICS]) <= NUMBERS


@pytest.mark.slow
def test_calibration_sends_the_listed_histograms(tmp_path):
    replies = replies_of(tmp_path, "partition.holdout=0.2", "calibration.alphas=[0.1]")[6:]
    kind, *listed = MESSAGES["calibration"]
    assert len(replies) == 6  # for the temperature, and for the scores
    assert {name for reply in replies for name in reply.content[kind]} == set(listed)
    assert all(set(reply.content) == {kind} for reply in replies)


@pytest.mark.slow
def test_a_confusion_matrix_sends_the_listed_counts(tmp_path):
    kind, answers, _ = MESSAGES["confusion"]
    replies = replies_of(tmp_path, "evaluation.confusion=true")[6:]
    assert [set(reply.content) for reply in replies] == [{kind}] * 3
    assert all(set(reply.content[kind]) == {answers} for reply in replies)  # of ten classes


@pytest.mark.slow
def test_a_fit_of_columns_sends_the_listed_statistics(tmp_path):
    table = tmp_path / "rows.csv"
    table.write_text("age,town,sick\n" + "30,Oslo,yes\n40,Rome,no\n" * 20)
    replies: list[Message] = []
    run_recipe(
        tmp_path / "run",
        *("task=tabular", f"task.path={table}", "task.target=sick"),
        *("task.classes=[no,yes]", "task.data_options.fit=federated", "partition=iid"),
        *("task.data_options.numeric=[age]", "task.data_options.categorical=[town]"),
        *("clients=3", "rounds=1", "local.steps=1", "local.epochs=null"),
        tamper=lambda reply: replies.append(reply) or reply,
    )
    registrations, fits = replies[:3], replies[3:6]
    assert all(set(reply.content) == {CLIENT} for reply in registrations)
    for reply in fits:
        assert set(reply.content) == {COLUMNS, CATEGORIES}
        assert {COLUMNS, CATEGORIES, *reply.content[COLUMNS]} == set(MESSAGES["columns"])


@pytest.mark.slow
def test_evaluation_at_the_clients_sends_the_listed_numbers(tmp_path):
    replies = replies_of(tmp_path, "evaluation.clients=true")[6:]
    assert replies
    for reply in replies:
        assert set(reply.content) == {METRICS}
        assert set(reply.content[METRICS]) == set(MESSAGES["evaluation"]) - {METRICS}
