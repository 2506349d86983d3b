"""What a method sends and keeps: two rounds of it on a tiny federation, in this process.

``python -m docs.generator.measure [METHOD ...]`` stores it in costs.json, which the pages show.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from flwr.app import Context, Message, MessageType, RecordDict
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from fedhet.common.flower.task_identity import set_identity
from fedhet.conf import compose, plain_part
from fedhet.conf.catalogue import method_of
from fedhet.conf.mistakes import options_of
from fedhet.server_app import app as server
from fedhet.server_app.checkpoint import checkpoints
from fedhet.strategies.wire.records import to_tensors
from fedhet.tasks import build_task
from tests.adapted import LORA
from tests.recipes import grid_of, overrides

TASK = "`digits` with its default model"
_CLIENTS = 2
_WORDS = (
    "task=digits",
    "task.train_size=200",
    "task.test_size=50",
    f"clients={_CLIENTS}",
    "rounds=2",
    "local.epochs=1",
    "local.steps=null",
    "local.batch_size=64",
    "strategy.phases=[]",  # one epoch cannot be divided, and no count depends on it
    "participation=1.0",
    "evaluation.every=0",
    "device=cpu",
    "logger=none",
    "runtime.channels_last=false",
)
_AT_SERVER = {
    "strategy.asynchronous.buffer": 1,  # of two clients
    "strategy.dense.epochs": 1,  # not counted, and minutes long
    "strategy.dense.steps": 1,
}
_SHARED = [*LORA, "strategy.phases=[{layers:'not:*.base_layer.weight',epochs:null}]"]
_MODELS = {
    "fedbn": ["task.model=bn_cnn"],  # the default model has no normalisation layers
    **dict.fromkeys(("ffa_lora", "fedsa_lora"), LORA),
    **dict.fromkeys(("flora", "fedex_lora"), _SHARED),
}
FILE = Path(__file__).with_name("costs.json")
Sizes = Mapping[str, float]  # by name, as a share of the model


@dataclass(frozen=True)
class Cost:
    """What a client and the server send and keep in a round; sizes are shares of the model's bytes.

    Attributes:
        down: what the server sends a client, by payload.
        up: what a client sends, by payload.
        client_state: what a client keeps between rounds, by name.
        server_state: what the server keeps beside the model, by name.
    """

    down: Sizes
    up: Sizes
    client_state: Sizes
    server_state: Sizes

    @property
    def traffic(self) -> float:
        """Bytes down and up for every byte of the model."""
        return sum(self.down.values()) + sum(self.up.values())


def measure(*words: str) -> Cost:
    """Run two rounds of a recipe, such as ``strategy=fedprox``, and count."""
    set_identity()  # in every message
    logging.getLogger("flwr").setLevel(logging.WARNING)
    recipe = compose(overrides(*words))
    short = {k: v for k, v in _AT_SERVER.items() if OmegaConf.select(recipe, k) is not None}
    required = [method_of(str(path))["requires"] for path in recipe.strategy.methods.values()]
    needed = {key: value for one in (short, *required) for key, value in one.items()}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        every = [
            *_WORDS,
            *(f"{key}={value}" for key, value in needed.items() if value is not None),
            *words,
        ]
        every.append(f"results_dir={folder}")
        up: list[Mapping[str, int]] = []

        def counted(reply: Message) -> Message:
            if reply.metadata.message_type == MessageType.TRAIN:
                up.append(_sent(reply))
            return reply

        recipe = compose(overrides(*every))
        clients = min(_CLIENTS, int(recipe.clients))
        grid = grid_of(every, clients, counted)
        context = Context(
            run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=overrides(*every)
        )
        server.main(grid, context)
        kept = max((folder / "client_state").rglob("client-00000/*"), default=None)
        checkpoint = load_file(checkpoints(folder / "checkpoints")[-1])
        client_state = load_file(kept) if kept else {}
    parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
    task = build_task(*parts, seed=0, num_clients=clients)
    whole = _bytes(task.build_model(0).state_dict().values())
    state = {n: v for n, v in checkpoint.items() if n.startswith("state/")}
    down = _sent(grid.sent[0])
    return Cost(
        *(_shares(part, whole) for part in (down, up[-1], _named(client_state), _named(state)))
    )


def _sent(message: Message) -> dict[str, int]:
    records = message.content.array_records
    return {name: _bytes(to_tensors(record).values()) for name, record in records.items()}


def _named(stored: Mapping[str, Tensor]) -> Counter[str]:
    """Return the bytes of stored tensors ``.../<name>/<tensor>`` by name."""
    found: Counter[str] = Counter()
    for key, value in stored.items():
        found[key.split("/")[-2]] += _bytes([value])
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in tensors)


def _shares(sizes: Mapping[str, int], whole: int) -> Sizes:
    return {name: size / whole for name, size in sizes.items() if size}


def stored(method: str) -> Cost:
    """Return what :func:`measure` has found for a method's recipe with its defaults."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    if method not in found:
        raise KeyError(f"{FILE.name} lacks {method}: run python -m docs.generator.measure {method}")
    return Cost(**found[method])


def main(names: Sequence[str]) -> None:
    """Measure the named methods, or all, and store what was found."""
    methods = names or options_of("strategy")
    found = json.loads(FILE.read_text(encoding="utf-8")) if names and FILE.exists() else {}
    for name in methods:
        found[name] = asdict(measure(f"strategy={name}", *_MODELS.get(name, ())))
        FILE.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
