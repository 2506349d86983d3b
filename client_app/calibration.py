"""A client's answers after the rounds: for prediction sets, and for the confusion matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict
from torch import Tensor

from fedhet.client_app.client import FederatedClient
from fedhet.client_app.messages import arrays_of
from fedhet.client_app.site_policy import SitePolicy
from fedhet.common.decisions import CONFUSION, counts_of
from fedhet.common.errors import ConfigError
from fedhet.strategies.wire.records import CONFIG, to_record
from fedhet.tasks.conformal import CALIBRATE, LOG_LOSSES
from fedhet.tasks.conformal.scores import probabilities_of
from fedhet.tasks.conformal.sketch import HeldOutClient

_SPLIT = 0xCA  # makes draws here independent of other draws


def calibrate_reply(client: FederatedClient, message: Message) -> Message:
    """Answer one of the two questions about the held-out examples (tasks/conformal/sketch.py).

    The message holds "params" (x) and "config": "temperature-share", "bins", and in the second
    exchange "temperature". The reply's "calibrate" holds "log-losses" (T,) at every temperature of
    the grid; or of each score, by its name, how many examples every bin has, (bins + 1,).
    """
    if client.held_out is None:
        raise ConfigError("this client has no held-out examples: set partition.holdout")
    config: dict[str, Any] = dict(message.content.config_records[CONFIG])
    logits, labels = client.logits(arrays_of(client, message), config)
    random = np.random.default_rng([client.shared.seed, client.client_id, _SPLIT])
    own = HeldOutClient.split(logits, labels, config["temperature-share"], random)
    if "temperature" not in config:
        answer: dict[str, Tensor] = {LOG_LOSSES: torch.from_numpy(own.log_losses())}
    else:
        found = own.histograms(float(config["temperature"]), int(config["bins"]))
        answer = {name: torch.from_numpy(counts.astype(np.int32)) for name, counts in found.items()}
    return Message(RecordDict({CALIBRATE: to_record(answer)}), reply_to=message)


def confusion_reply(
    client: FederatedClient, message: Message, policy: SitePolicy | None
) -> Message:
    """Answer with "confusion", the counts of common/decisions.py for the evaluation's examples."""
    config: dict[str, Any] = dict(message.content.config_records[CONFIG])
    logits, labels = client.logits(arrays_of(client, message), config)
    counts = counts_of(probabilities_of(logits, 1.0), labels)
    if policy is not None:
        counts = policy.counted(counts)
    answer = {name: torch.from_numpy(table.astype(np.int32)) for name, table in counts.items()}
    return Message(RecordDict({CONFUSION: to_record(answer)}), reply_to=message)
