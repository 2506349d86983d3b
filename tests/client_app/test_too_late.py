"""A client that nobody waits for any more ends itself, where that harms no other."""

from __future__ import annotations

import faulthandler
import json

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import client_app.app


@pytest.fixture
def timers(monkeypatch) -> list[object]:
    """Return the timers that were set, and None for each that was taken back."""
    found: list[object] = []
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # messages carry them
    monkeypatch.setattr(
        faulthandler,
        "dump_traceback_later",
        lambda seconds, exit, file: found.append((seconds, exit)),
    )
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: found.append(None))
    return found


def ask(kind: str, config: dict[str, float], *words: str) -> None:
    context = Context(
        run_id=1,
        node_id=1,
        node_config={},
        state=RecordDict(),
        run_config={"overrides": json.dumps(words)},
    )
    content = RecordDict({"config": ConfigRecord(config)} if config else {})
    message = Message(content, dst_node_id=1, message_type=kind, ttl=77.0)
    with pytest.raises(ValueError, match="the node config lacks partition-id"):
        client_app.app.app(message, context)


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_a_message_of_a_deployment_has_as_long_as_the_server_waits(timers, kind):
    ask(kind, {"timeout-seconds": 55.0}, "runtime.simulation=false")
    assert timers == [(55.0, True), None]


def test_the_roll_calls_has_as_long_as_it_lives(timers):
    ask("query", {}, "runtime.simulation=false")
    assert timers == [(77.0, True), None]


def test_a_worker_of_a_simulation_plays_others_too(timers):
    ask("train", {"timeout-seconds": 55.0})
    assert timers == []
