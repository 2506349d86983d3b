"""Code that is not the federation's: each node that runs it gets a mark in its state folder."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

MARK = "stranger-was-here"
server = ServerApp()
client = ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    nodes = list(grid.get_node_ids())
    asked = [Message(RecordDict(), message_type="query", dst_node_id=node) for node in nodes]
    print("answers:", len(list(grid.send_and_receive(asked, timeout=300))))


@client.query()
def query(message: Message, context: Context) -> Message:
    Path(str(context.node_config["state-folder"]), MARK).touch()
    return Message(RecordDict(), reply_to=message)
