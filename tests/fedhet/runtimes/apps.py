"""A ClientApp for the tests of workers, which import it by name."""

import os
import signal
import time

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedhet.strategies.wire.records import to_record

app = ClientApp()


@app.query()
def count(message: Message, context: Context) -> Message:
    client = int(context.node_config["partition-id"])
    node_info = ConfigRecord({"num-examples": 10 * (client + 1)})
    return Message(RecordDict({"client": node_info}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Fail, die or sleep if the config asks for it; count the visits in the Context's state."""
    client = int(context.node_config["partition-id"])
    asked = message.content.config_records["config"].get(f"client-{client}", "")
    if asked == "fail":
        raise ValueError("this client cannot")
    if asked == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if asked == "sleep":
        time.sleep(60)
    visits = int(context.state.metric_records.get("visits", {"count": 0})["count"]) + 1
    context.state["visits"] = MetricRecord({"count": visits})
    values = message.content.array_records["params"]["x"].numpy() + client
    numbers = {
        "pid": os.getpid(),
        "visits": visits,
        "own": float(np.sum(message.content.array_records["own"]["y"].numpy())),
        "num-partitions": int(context.node_config["num-partitions"]),
    }
    content = {"update": ArrayRecord({"x": Array(values)}), "metrics": MetricRecord(numbers)}
    return Message(RecordDict(content), reply_to=message)


numbers = ClientApp()


def update_of(client: int, shapes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(client)
    return {n: 10.0**-client * torch.randn(s, generator=generator) for n, s in shapes.items()}


@numbers.train()
def numbers_of(message: Message, context: Context) -> Message:
    """Send random numbers of the client; die or sleep as ``train`` does, or once, or send NaN.

    One that pauses waits for the marker, or ten seconds.
    """
    client = int(context.node_config["partition-id"])
    config = message.content.config_records["config"]
    asked, marker = config.get(f"client-{client}", ""), config.get("marker")
    if asked == "fail":
        raise ValueError("this client cannot")
    if asked == "die" and not (marker and os.path.exists(marker)):
        if marker:
            open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if asked == "sleep":
        time.sleep(60)
    until = time.monotonic() + 10
    while asked == "pause" and not os.path.exists(str(marker)) and time.monotonic() < until:
        time.sleep(0.05)
    visits = int(context.state.metric_records.get("visits", {"count": 0})["count"]) + 1
    context.state["visits"] = MetricRecord({"count": visits})
    shapes = {n: array.shape for n, array in message.content.array_records["params"].items()}
    update = update_of(client, shapes)
    extra = {"w": -update["w"]}
    if asked == "nan":
        update["b"][0] = float("nan")
    counts = {"num-examples": client + 1, "num-steps": 1, "lr-sum": 0.1, "partition-id": client}
    content = {"update": to_record(update), "extra": to_record(extra)}
    return Message(RecordDict({**content, "metrics": MetricRecord(counts)}), reply_to=message)
