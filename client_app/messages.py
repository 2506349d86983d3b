"""Translates Flower messages to FederatedClient calls, and the results to replies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common import NDArrays, Scalar

from fedhet.client_app.client import FederatedClient
from fedhet.strategies.base import ClientSide, Reply
from fedhet.strategies.wire.border import encode
from fedhet.strategies.wire.compressed_records import (
    compressible,
    per_example,
    received_tensors,
    rounded_tensors,
)
from fedhet.strategies.wire.records import (
    CONFIG,
    KEPT,
    METRICS,
    PARAMS,
    UPDATE,
    config_of,
    record_in,
    to_metrics,
    to_tensors,
)

_UPLOAD = 0x0C  # makes draws for an upload independent of the batches


def train_reply(
    client: FederatedClient,
    message: Message,
    evaluate_every: int = 0,
    evaluate_trained: bool = False,
) -> Message:
    """Answer with the reply of :func:`trained`: "update", the client's payloads, "metrics"."""
    config = config_of(message)
    reply = _train(client, message, config, evaluate_every, evaluate_trained)
    payloads, round = compressible(client.sides), int(config["round"])
    moved = {n: value for n, value in reply.update.items() if n not in client.shared.untrained}
    to_send = replace(reply, update=moved)
    content = encode(to_send, client.shared.compression, payloads, round, client.state)
    if any(type(s).after_sending is not ClientSide.after_sending for s in client.sides.values()):
        rounded = rounded_tensors(to_send, content, client.shared.compression, payloads, round)
        if rounded:
            update = {**reply.update, **rounded.pop(UPDATE, {})}
            sent = replace(reply, update=update, payloads={**reply.payloads, **rounded})
            _keep_sent(client, sent)
    client.save_state(config)  # with what compression has left out
    return Message(content, reply_to=message)


def trained(
    client: FederatedClient,
    message: Message,
    evaluate_every: int = 0,
    evaluate_trained: bool = False,
) -> Reply:
    """Train on a train message; return what to send, in full: y_i - x, payloads and metrics.

    Args:
        client: the client.
        message: holds "params" (x), the server's payloads, and "config".
        evaluate_every: evaluate the received model every that many rounds; 0 never.
        evaluate_trained: evaluate the trained model.
    """
    config = config_of(message)
    reply = _train(client, message, config, evaluate_every, evaluate_trained)
    client.save_state(config)
    return reply


def _train(
    client: FederatedClient,
    message: Message,
    config: dict[str, Any],
    evaluate_every: int,
    evaluate_trained: bool,
) -> Reply:
    began = time.perf_counter()
    since_first = int(config["round"]) - 1
    config["evaluate-received"] = evaluate_every > 0 and since_first % evaluate_every == 0
    config["evaluate-trained"] = evaluate_trained
    content, shared = message.content, client.shared
    received = received_tensors(content, shared.compression, *shared.travelling(), shared.decoded)
    anchor, record = received.pop(PARAMS), record_in(content, PARAMS, ArrayRecord)
    client.begin_as(received.pop(KEPT, {}))
    client.received, shared.decoded = received, None if record is None else (record, anchor)
    x = shared.as_model(anchor)
    num_examples, metrics = client.train([x[name].numpy() for name in shared.shared_names], config)
    row = {"partition-id": client.client_id, "num-examples": num_examples, **_numbers(metrics)}
    changes = shared.change_since(x)
    reply = Reply(
        client_id=client.client_id,
        num_examples=num_examples,
        num_steps=int(row["num-steps"]),
        lr_sum=row["lr-sum"],
        update={name: v for name, v in changes.items() if name not in shared.buffer_names},
        buffers={name: v for name, v in changes.items() if name in shared.buffer_names},
        payloads=client.sent,
        per_example=per_example(client.sides),
        metrics=row | {"fit-seconds": time.perf_counter() - began},
    )
    sides = [s for s in client.sides.values() if type(s).upload is not ClientSide.upload]
    if sides:
        seed = upload_seed(shared.seed, client.client_id, message)
        for side in sides:
            reply = side.upload(reply, client.received, seed)
    if any(side.clips for side in sides):
        _keep_sent(client, reply)
    return reply


def _keep_sent(client: FederatedClient, reply: Reply) -> None:
    for side in client.sides.values():
        side.after_sending(reply, client.state)


def without_state(message: Message) -> Message:
    """Return a train message to a client that has not taken part yet."""
    content = RecordDict(dict(message.content))
    config = config_of(message)
    content[CONFIG] = ConfigRecord({**config, "state-round": 0, "state-dropped": ""})
    return Message(content, dst_node_id=0, message_type=MessageType.TRAIN)


def upload_seed(seed: int, client_id: int, message: Message) -> np.random.SeedSequence:
    """Return the seed of the random draws for a client's upload, of the run and the round."""
    round = int(config_of(message)["round"])
    return np.random.SeedSequence([seed, round, client_id, _UPLOAD])


def evaluate_reply(client: FederatedClient, message: Message, finetune_epochs: int = 0) -> Message:
    """Run ``evaluate`` on an evaluate message; the reply's "metrics" hold loss and accuracy."""
    config = config_of(message)
    config["finetune-epochs"] = finetune_epochs
    arrays = arrays_of(client, message)
    loss, num_examples, metrics = client.evaluate(arrays, config)
    row = {"partition-id": client.client_id, "num-examples": num_examples, "loss": loss}
    return Message(RecordDict({METRICS: to_metrics(row | _numbers(metrics))}), reply_to=message)


def arrays_of(client: FederatedClient, message: Message) -> NDArrays:
    """Return x of a message that trains nothing, as the client's methods take it."""
    records = message.content.array_records
    client.begin_as(to_tensors(records[KEPT]) if KEPT in records else {})
    params = to_tensors(records[PARAMS])
    return [params[name].numpy() for name in client.shared.shared_names]


def _numbers(metrics: Mapping[str, Scalar]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
