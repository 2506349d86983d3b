"""The project's ClientApp, at a site where things go wrong.

Which and when is in faults.json of the node's state folder: {"3": "nan"} spoils what round 3 sends.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedhet.client_app import app as honest
from fedhet.strategies.round.records import CONFIG, UPDATE, to_record, to_tensors

app = ClientApp()
DELTA = "control_variate_delta"
WAITING, GO = "waiting", "go"


@app.query()
def query(message: Message, context: Context) -> Message:
    return honest.app(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    folder = Path(str(context.node_config["state-folder"]))
    path = folder / "faults.json"
    faults = json.loads(path.read_text()) if path.exists() else {}
    fault = faults.get(str(message.content.config_records[CONFIG]["round"]), "")
    if fault in BEFORE:
        BEFORE[fault](folder)
    reply = honest.app(message, context)
    if fault in AFTER:
        AFTER[fault](reply)
    return reply


# ---- what goes wrong -----------------------------------------------------------------------------


def raise_error(folder: Path) -> None:
    raise RuntimeError("the scanner is out of order")


def hang(folder: Path) -> None:
    """Never come back from training."""

    def train_for_ever(*args: object) -> Message:
        (folder / WAITING).touch()
        while True:
            time.sleep(1.0)

    honest.train_reply = train_for_ever


def wait(folder: Path) -> None:
    """Go on when somebody says so, five minutes later at the latest."""
    (folder / WAITING).touch()
    end = time.monotonic() + 300
    while not (folder / GO).exists() and time.monotonic() < end:
        time.sleep(0.2)


def change(reply: Message, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the first tensor of a payload."""
    tensors = to_tensors(reply.content.array_records[name])
    first = next(iter(tensors))
    tensors[first] = edit(tensors[first])
    reply.content[name] = to_record(tensors)


BEFORE: dict[str, Callable[[Path], object]] = {
    "raise": raise_error,
    "die": lambda folder: os._exit(9),
    "hang": hang,
    "wait": wait,
}
AFTER: dict[str, Callable[[Message], object]] = {
    "nan": lambda reply: change(reply, UPDATE, lambda x: torch.full_like(x, float("nan"))),
    "too_few": lambda reply: reply.content.pop(DELTA),
    "huge": lambda reply: change(reply, DELTA, lambda x: torch.rand(50_000_000)),  # 200 MB
}
