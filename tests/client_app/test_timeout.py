"""A client ends its process when the server no longer waits for it, unless others share it."""

import faulthandler
import json

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedhet.client_app.app import app
from fedhet.client_app.errors import SiteError
from fedhet.common.errors import ConfigError
from tests.refused import refused

DEPLOYED = ["runtime.simulation=false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config", "words", "timers"),
    [
        ("train", {"timeout-seconds": 55.0}, DEPLOYED, [(55.0, True), None]),
        ("query", {}, DEPLOYED, [(77.0, True), None]),  # the registration: as long as it lives
        ("train", {"timeout-seconds": 55.0}, [], []),  # a simulation's worker plays others, too
    ],
)
def test_the_timer_is_set_and_cancelled(kind, config, words, timers, monkeypatch):
    found: list[object] = []

    def later(seconds: float, exit: bool, file: object) -> None:
        found.append((seconds, exit))

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: found.append(None))
    run_config = {"overrides": json.dumps(words)}
    context = Context(1, 1, node_config={}, state=RecordDict(), run_config=run_config)
    content = RecordDict({"config": ConfigRecord(config)} if config else {})
    message = Message(content, dst_node_id=1, message_type=kind, ttl=77.0)
    with refused("partition-id", kind=(ConfigError, SiteError)):
        app(message, context)
    assert found == timers
