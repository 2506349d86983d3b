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
