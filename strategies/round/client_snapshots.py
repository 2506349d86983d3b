"""The replies of the last round, stored beside the run (checkpoint.client_models=true).

Reports of one-shot fusion read them, and another run can reuse the models (local.reuse_training).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from fedhet.common.checksums import CLIENT_MODELS, read_label, require_label
from fedhet.common.errors import ConfigError
from fedhet.strategies.base import Cohort, Reads, Reply, ReplySum, Tensors, local_model
from fedhet.strategies.wire.tensor_files import below, load_tensors, save_tensors

FILE = "client_models.safetensors"
RECEIVED, MODEL, PAYLOAD = "received", "model", "payload"
TRAIN_LOSS = "train-loss"
_COUNTS = ("num_examples", "num_steps", "lr_sum")


@dataclass(frozen=True)
class ClientSnapshots:
    """An observer that writes the replies of each round to a file.

    The file holds the trainable shared tensors: x as "received/NAME", and for each client y_i as
    "<client>/model/NAME" and its payloads as "<client>/payload/PAYLOAD/NAME".
    """

    path: Path
    reads = Reads.MODELS
    key = "checkpoint.client_models"

    def __call__(
        self, params: Tensors, total: ReplySum, replies: Sequence[Reply], cohort: Cohort
    ) -> None:
        """Write x and the replies."""
        tensors = {f"{RECEIVED}/{name}": x for name, x in params.items()}
        clients = {}
        for reply in replies:
            client = str(reply.client_id)
            clients[client] = {key: getattr(reply, key) for key in _COUNTS}
            clients[client][TRAIN_LOSS] = reply.metrics.get(TRAIN_LOSS, float("nan"))
            for name, value in local_model(params, reply).items():
                tensors[f"{client}/{MODEL}/{name}"] = value
            for payload, values in reply.payloads.items():
                for name, value in values.items():
                    tensors[f"{client}/{PAYLOAD}/{payload}/{name}"] = value.contiguous()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a file sorts its tensors by name
        label = {"kind": CLIENT_MODELS, "clients": clients, "order": list(params)}
        save_tensors(self.path, tensors, label)


def load_replies(path: Path) -> tuple[dict[str, Tensor], list[Reply]]:
    """Return x, in the model's order, and the replies, by client, of a :class:`ClientSnapshots`."""
    tensors, _, about = load_tensors(path, kind=CLIENT_MODELS)
    params = {name: tensors[f"{RECEIVED}/{name}"] for name in about["order"]}
    counts = {int(client): of_client for client, of_client in about["clients"].items()}
    return params, [_reply(client, params, tensors, counts[client]) for client in sorted(counts)]


@dataclass(frozen=True)
class TrainedClient:
    """One client of a :class:`ClientSnapshots`: y_i, n_i, K, and the mean loss of its training."""

    model: Tensors
    num_examples: int
    num_steps: int
    train_loss: float


def load_trained(path: Path, client: int, like: Tensors) -> TrainedClient:
    """Return one client, with a model that is shaped as ``like``."""
    if not path.is_file():
        raise ConfigError(
            f"local.reuse_training={path.parent} has no {path.name}: name the folder of a finished "
            "run with checkpoint.client_models=true"
        )
    label = read_label(path)
    require_label(path, label, kind=CLIENT_MODELS)
    clients = label.get("clients", {})
    with safe_open(path, framework="pt") as file:
        if str(client) not in clients:
            raise ConfigError(
                f"local.reuse_training={path.parent} lacks client {client}: it has "
                f"{sorted(clients)}"
            )
        keys = below(f"{client}/{MODEL}/", {key: key for key in file.keys()})
        model = {name: file.get_tensor(key) for name, key in keys.items()}
    shapes = {name: tuple(value.shape) for name, value in model.items()}
    if shapes != {name: tuple(value.shape) for name, value in like.items()}:
        raise ConfigError(
            f"local.reuse_training={path.parent} holds models of the tensors {shapes}, but the "
            "model of this run has others (buffers and personal tensors are not stored)"
        )
    counts = clients[str(client)]
    return TrainedClient(
        model, int(counts["num_examples"]), int(counts["num_steps"]), counts[TRAIN_LOSS]
    )


def _reply(client: int, params: Tensors, tensors: Tensors, counts: dict[str, float]) -> Reply:
    model = below(f"{client}/{MODEL}/", tensors)
    payloads: dict[str, dict[str, Tensor]] = {}
    for key, value in below(f"{client}/{PAYLOAD}/", tensors).items():
        payload, _, name = key.partition("/")
        payloads.setdefault(payload, {})[name] = value
    return Reply(
        client_id=client,
        num_examples=int(counts["num_examples"]),
        num_steps=int(counts["num_steps"]),
        lr_sum=counts["lr_sum"],
        update={name: model[name] - x for name, x in params.items()},
        payloads=payloads,
    )
