"""The project's ClientApp, at a site where things go wrong.

Which and when is in faults.json of the node's state folder: {"3": "nothing"} spoils what round 3
sends, and {"card": "empty"} the answer to the registration.
"""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedhet.client_app import app as honest
from fedhet.strategies.wire.packed_records import with_plain_records
from fedhet.strategies.wire.records import CONFIG, METRICS, UPDATE, to_record, to_tensors

app = ClientApp(mods=[with_plain_records])
DELTA = "control_variate_delta"
WAITING, GO = "waiting", "go"


@app.query()
def query(message: Message, context: Context) -> Message:
    if planned(context)[1].get("card") == "empty":
        return Message(RecordDict(), reply_to=message)
    return honest.app(message, context)


@app.train()
def train(message: Message, context: Context) -> Message:
    folder, faults = planned(context)
    fault = faults.get(str(message.content.config_records[CONFIG]["round"]), "")
    if fault in BEFORE:
        BEFORE[fault](folder)
    reply = honest.app(message, context)
    if fault in AFTER:
        AFTER[fault](reply)
    return reply


def planned(context: Context) -> tuple[Path, dict[str, str]]:
    """Return the node's state folder, and its faults."""
    folder = Path(str(context.node_config["state-folder"]))
    path = folder / "faults.json"
    return folder, json.loads(path.read_text()) if path.exists() else {}


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


def hog(folder: Path) -> None:
    """Take memory until the kernel ends this process."""
    taken = []
    while True:
        taken.append(b"x" * (64 << 20))


def change(reply: Message, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace the first tensor of a payload."""
    tensors = to_tensors(reply.content.array_records[name])
    first = next(iter(tensors))
    tensors[first] = edit(tensors[first])
    reply.content[name] = to_record(tensors)


def write(reply: Message, data: bytes) -> None:
    """Replace the bytes of the update's first array."""
    record = reply.content.array_records[UPDATE]
    name = next(iter(record))
    record[name] = Array("float32", tuple(record[name].shape), "numpy.ndarray", data)


def forge(reply: Message, **numbers: float) -> None:
    """Overwrite, or add, numbers among the metrics."""
    reply.content.metric_records[METRICS].update(numbers)


BEFORE: dict[str, Callable[[Path], object]] = {
    "raise": raise_error,
    "die": lambda folder: os._exit(9),
    "hang": hang,
    "wait": wait,
    "hog": hog,
}
AFTER: dict[str, Callable[[Message], object]] = {
    "nothing": lambda reply: write(reply, b""),
    "3e38": lambda reply: change(reply, UPDATE, lambda x: torch.full_like(x, 3e38)),
    "forged": lambda reply: forge(reply, accuracy=1.0, loss=0.0, round=0),
    "too_few": lambda reply: reply.content.pop(DELTA),
    "huge": lambda reply: change(reply, DELTA, lambda x: torch.rand(50_000_000)),  # 200 MB
}
