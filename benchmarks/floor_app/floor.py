"""Flower's floor: arrays go down, other ones come up, the mean goes down; no torch, no learning."""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

TOLD = "floor-told "
server = ServerApp()
client = ClientApp()


@client.train()
def answer(message: Message, context: Context) -> Message:
    """Send arrays back that no other node and no other round has: equal ones travel once."""
    own = np.float32(int(context.node_config["partition-id"]) + 1)
    arrays = message.content.array_records["params"]
    changed = {name: Array(array.numpy() + own) for name, array in arrays.items()}
    return Message(RecordDict({"update": ArrayRecord(changed)}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Send, receive, and take the mean, in rounds."""
    config = context.run_config
    shapes = json.loads(str(config["shapes"]))
    # random numbers: of an array's pieces that are equal Flower sends one
    random = np.random.default_rng(0)
    model = {str(i): random.random(shape, np.float32) for i, shape in enumerate(shapes)}
    while len(nodes := list(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.2)
    for round in range(1, int(config["rounds"]) + 1):
        began = time.perf_counter()
        content = RecordDict({"params": ArrayRecord({k: Array(v) for k, v in model.items()})})
        messages = [Message(content, node, "train") for node in nodes]
        replies = list(grid.send_and_receive(messages, timeout=3600))
        updates = [reply.content.array_records["update"] for reply in replies]
        model = {
            name: np.mean([update[name].numpy() for update in updates], axis=0, dtype=np.float32)
            for name in model
        }
        row = {"round": round, "seconds": time.perf_counter() - began, "replies": len(replies)}
        sys.stdout.write(TOLD + json.dumps(row) + "\n")
