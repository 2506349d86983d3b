"""A client's answers for the calibration of prediction sets on its held-out examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedhet.client_app.client import FederatedClient
from fedhet.client_app.messages import arrays_of
from fedhet.strategies.wire.records import CONFIG, to_record
from fedhet.tasks.conformal import CALIBRATE, LOG_LOSSES
from fedhet.tasks.conformal.sketch import Client

_SPLIT = 0xCA  # makes draws here independent of other draws


def calibrate_reply(client: FederatedClient, message: Message) -> Message:
    """Answer one of the two questions about the held-out examples (tasks/conformal/sketch.py).

    The message holds "params" (x) and "config": "temperature-share", "bins", and in the second
    exchange "temperature". The reply's "calibrate" holds "log-losses" (T,) at every temperature of
    the grid; or of each score, by its name, how many examples every bin has, (bins + 1,).
    """
    config: dict[str, Any] = dict(message.content.config_records[CONFIG])
    logits, labels = client.logits(arrays_of(client, message), config)
    random = np.random.default_rng([client.shared.seed, client.client_id, _SPLIT])
    own = Client.split(logits, labels, config["temperature-share"], random)
    if "temperature" not in config:
        answer: dict[str, Tensor] = {LOG_LOSSES: torch.from_numpy(own.log_losses())}
    else:
        found = own.histograms(float(config["temperature"]), int(config["bins"]))
        answer = {name: torch.from_numpy(counts.astype(np.int32)) for name, counts in found.items()}
    return Message(RecordDict({CALIBRATE: to_record(answer)}), reply_to=message)
