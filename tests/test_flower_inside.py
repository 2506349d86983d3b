"""common/flower: what Flower lacks, shown by Flower alone. A test that fails names what can go."""

import io
import logging
import subprocess
import sys

import flwr.app
import flwr.clientapp
import flwr.clientapp.mod
import flwr.serverapp
import pytest
from flwr.common.logger import console_handler, log
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate import NodeStateFactory

from fedhet.common.flower import stopped_runs
from fedhet.common.flower.console import write_log_to


@pytest.mark.slow
def test_a_message_needs_an_identity():
    words = "from flwr.app import Message, RecordDict; Message(RecordDict(), 1, 'train')"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert "run_id is not set" in done.stderr
    words = f"from fedhet.common.flower.task_identity import set_identity; set_identity(); {words}"
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_flower_has_no_public_way_to_copy_a_message():
    assert not {"make_message", "ErrorCode"} & {*flwr.app.__all__}


def test_flower_exports_no_clipping():
    names = {*flwr.app.__all__, *flwr.serverapp.__all__, *flwr.clientapp.__all__}
    assert not [name for name in names if "clip" in name.lower()]


def test_flowers_message_api_has_no_secure_aggregation():
    assert not [name for name in flwr.clientapp.mod.__all__ if "secagg" in name.lower()]


def test_flowers_log_keeps_the_stream_of_the_start(monkeypatch):
    before, later, ours = console_handler.stream, io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)
    write_log_to(ours)
    try:
        log(logging.WARNING, "a word")
    finally:
        write_log_to(before)
    assert ("a word" in ours.getvalue(), later.getvalue()) == (True, "")


@pytest.mark.parametrize("stopped_at", ["pull_object", "confirm_message_received"])
def test_a_supernode_drops_the_message_of_a_run_that_was_stopped(stopped_at, monkeypatch):
    message = flwr.app.Message(flwr.app.RecordDict(), dst_node_id=7, message_type="train")
    message.metadata.__dict__ |= {"_run_id": 1, "_message_id": message.object_id}
    objects = get_all_nested_objects(message)

    def stop(*_: object) -> None:
        raise RunNotRunningException

    def left() -> tuple[int, list[str]]:
        """Receive the message; return how many are kept, and how their tasks ended."""
        factory = ObjectStoreFactory()
        state = NodeStateFactory(factory).state()
        state.store_run(Run.create_empty(1))
        requests = {
            "pull_object": lambda run, name: objects[name].deflate(),
            "confirm_message_received": lambda run, name: None,
        }
        received = start_client_internal._pull_and_store_message(
            state=state,
            object_store=factory.store(),
            node_config={},
            receive=lambda: (message, get_object_tree(message)),
            get_run=None,
            get_fab=None,
            trusted_entities=None,
            **requests | {stopped_at: stop},
        )
        assert received is None
        return len(state.msg_store), [task.status.sub_status for task in state.get_tasks()]

    assert left() == (1, [""])
    own = start_client_internal._pull_and_store_message
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", own)
    stopped_runs.install()
    assert left() == (0, ["failed"])
