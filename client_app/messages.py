"""Messages in front of a FederatedClient, and its results behind it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.typing import Scalar

from client_app.client import FederatedClient
from strategies.base import subtract
from strategies.records import CONFIG, METRICS, PARAMS, UPDATE, to_metrics, to_record, to_tensors


def train_reply(
    client: FederatedClient,
    message: Message,
    evaluate_every: int = 0,
    evaluate_trained: bool = False,
) -> Message:
    """Run ``fit`` on a train message.

    Args:
        client: the client.
        message: holds "params" (x), the server's payloads, and "config".
        evaluate_every: evaluate the received model every that many rounds; 0 never.
        evaluate_trained: evaluate the trained model.

    Returns:
        a reply with "update" (y_i - x), the client's payloads, and "metrics".
    """
    began = time.perf_counter()
    config: dict[str, Any] = dict(message.content.config_records[CONFIG])
    since_first = int(config["round"]) - 1
    config["evaluate-received"] = evaluate_every > 0 and since_first % evaluate_every == 0
    config["evaluate-trained"] = evaluate_trained
    anchor = to_tensors(message.content.array_records[PARAMS])
    client.received = {
        name: to_tensors(record)
        for name, record in message.content.array_records.items()
        if name != PARAMS
    }
    arrays = [anchor[name].numpy() for name in client.shared_names]
    trained, num_examples, metrics = client.fit(arrays, config)
    row = {"partition-id": client.client_id, "num-examples": num_examples, **_numbers(metrics)}
    local = dict(zip(client.shared_names, map(torch.from_numpy, trained), strict=True))
    content: dict[str, ArrayRecord | MetricRecord | ConfigRecord] = {
        UPDATE: to_record(subtract(local, anchor)),
    }
    content |= {name: to_record(tensors) for name, tensors in client.sent.items()}
    content[METRICS] = to_metrics(row | {"fit-seconds": time.perf_counter() - began})
    return Message(RecordDict(content), reply_to=message)


def evaluate_reply(client: FederatedClient, message: Message, finetune_epochs: int = 0) -> Message:
    """Run ``evaluate`` on an evaluate message; the reply's "metrics" hold loss and accuracy."""
    config: dict[str, Any] = dict(message.content.config_records[CONFIG])
    config["finetune-epochs"] = finetune_epochs
    params = to_tensors(message.content.array_records[PARAMS])
    arrays = [params[name].numpy() for name in client.shared_names]
    loss, num_examples, metrics = client.evaluate(arrays, config)
    row = {"partition-id": client.client_id, "num-examples": num_examples, "loss": loss}
    return Message(RecordDict({METRICS: to_metrics(row | _numbers(metrics))}), reply_to=message)


def _numbers(metrics: Mapping[str, Scalar]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
