"""docs/what-leaves.md lists all that a site sends: of every recipe, with any of its options on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flwr.app import Message

from conf import build_part, compose
from strategies.round.records import CLIENT, METRICS, UPDATE
from tests.recipes import TINY, overrides, run_recipe
from tests.test_every_strategy import WORDS, name_of

ROOT = Path(__file__).parents[1]
METHODS = sorted(path.stem for path in (ROOT / "conf" / "strategy").glob("*.yaml"))


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
SENDERS = {method for methods in PAYLOADS.values() for method in methods}
NUMBERS = {name for row in tables()["name"][1:] for name in names(row[0])}


def sent_by(*words: str) -> set[str]:
    recipe = compose(overrides(*words))
    sides = build_part(recipe, "strategy.client_sides", 1).values()
    return {name for side in sides for name in side.sends}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(method, marks=[] if method in SENDERS else pytest.mark.flower)
        for method in METHODS
    ],
)
def test_the_page_has_every_payload_of_a_method(method):
    listed = {payload for payload, methods in PAYLOADS.items() if method in methods}
    assert sent_by(f"strategy={method}") == listed


def test_the_page_names_no_method_that_is_none():
    assert set(METHODS) >= SENDERS


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["strategy=fedrep", "evaluation.model=both", "partition.holdout=0.2"],
        ["strategy=[feddw,scaffold]", "strategy.scaffold.option=I"],
    ],
    ids=name_of,
)
def test_replies_hold_what_the_page_has(words, tmp_path):
    look_at_replies(words, tmp_path)


@pytest.mark.flower  # every recipe once more
@pytest.mark.parametrize("words", WORDS, ids=name_of)
def test_every_recipes_replies_hold_what_the_page_has(words, tmp_path):
    look_at_replies(words, tmp_path)


def look_at_replies(words: list[str], folder: Path) -> None:
    replies: list[Message] = []

    def seen(reply: Message) -> Message:
        replies.append(reply)
        return reply

    run_recipe(folder / "run", *TINY, "rounds=1", *words, tamper=seen)
    clients = int(compose(overrides(*TINY, *words)).clients)
    node_infos, trained = replies[:clients], replies[clients:]
    assert 0 < len(trained) <= clients  # evaluation rides along: there is no second exchange
    for node_info in node_infos:
        assert set(node_info.content) == {CLIENT}
        assert set(node_info.content[CLIENT]) == set(MESSAGES["roll call"])
    for reply in trained:
        payloads = set(reply.content) - {UPDATE, METRICS}
        assert payloads == sent_by(*words)
        assert payloads <= PAYLOADS.keys()
        assert set(reply.content[METRICS]) <= NUMBERS


@pytest.mark.slow
def test_a_sites_calibration_holds_what_the_page_has(tmp_path):
    replies: list[Message] = []

    def seen(reply: Message) -> Message:
        replies.append(reply)
        return reply

    words = [*TINY, "rounds=1", "partition.holdout=0.2", "calibration.alphas=[0.1]"]
    run_recipe(tmp_path / "run", *words, clients=3, tamper=seen)
    kind, *listed = MESSAGES["calibration"]
    first, second = replies[6:9], replies[9:]
    assert len(second) == 3
    assert {name for reply in first + second for name in reply.content[kind]} == set(listed)
    assert all(set(reply.content) == {kind} for reply in first + second)


@pytest.mark.slow
def test_a_sites_evaluation_holds_what_the_page_has(tmp_path):
    replies: list[Message] = []

    def seen(reply: Message) -> Message:
        replies.append(reply)
        return reply

    run_recipe(
        tmp_path / "run", *TINY, "rounds=1", "evaluation.clients=true", clients=3, tamper=seen
    )
    listed = set(MESSAGES["evaluation"]) - {METRICS}
    for reply in replies[6:]:
        assert set(reply.content) == {METRICS}
        assert set(reply.content[METRICS]) == listed
