"""A ClientApp for the tests of workers, which import it by name."""

import os
import signal
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

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
