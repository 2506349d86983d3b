"""A local step does not synchronise: values are read back from the device once a round.

On the CPU, operators are counted inside ``train_locally`` that would drain a GPU's queue: the host
reads a number or a shape out of a tensor or writes one into it. A pass and a round may have some,
so two steps are compared with six in as many passes. The last test sees copies by ``to``, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from client_app import client as client_module
from client_app.client import FederatedClient
from client_app.state import ContextStateStore
from client_app.training import train_locally
from conf import build_local_optimizer, build_part, compose, plain_part
from strategies.base import Batch, Cohort, Reply, ServerSide, subtract
from strategies.components.local_training_config import local_training_config
from strategies.components.tensor_selection import TensorSelector
from tasks import build_task
from tests.recipes import TINY, overrides
from tests.test_every_strategy import METHODS, name_of

pytestmark = pytest.mark.slow

BATCH, PASSES, RARELY, OFTEN = 8, 2, 1, 3  # steps a pass
WORDS = [*TINY, "partition=iid", "+task.flip=true", "+task.crop_padding=1", "local.clip=10"]
WORDS += ["+task.crop_probability=0.5", f"local.batch_size={BATCH}", f"local.epochs={PASSES}"]

aten = torch.ops.aten
READING = {
    aten._local_scalar_dense.default,  # float(x), x.item(), if x
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
    aten.nanmedian.default,  # on a GPU; with a dim it does not
    aten.lift_fresh.default,  # torch.tensor(1.0)
}
MASKED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
UNSEEN = {torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist}


found: Counter[str] = Counter()


def is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


class Operators(TorchDispatchMode):
    """Counts operators that read a value back."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READING or (func in MASKED and any(map(is_mask, args[1]))):
            found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    """Counts methods that read values back without an operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in UNSEEN:
            found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Federation:
    """A client and the server halves of a recipe, round by round, with ``steps`` batches a pass."""

    def __init__(self, words: list[str], steps: int, device: str = "cpu") -> None:
        recipe = compose(overrides(*WORDS, *words))
        clients = int(recipe.clients)
        config = plain_part(recipe, "task") | {"train_size": clients * BATCH * steps}
        task = build_task(config, plain_part(recipe, "partition"), seed=0, num_clients=clients)
        model, tensors = task.build_model(0).to(device), task.classifier_tensors
        self.client = FederatedClient(
            0,
            model,
            task.client_data(0, device)[0],
            task.loss,
            build_local_optimizer(recipe, tensors),
            local_training_config(recipe.local, recipe.strategy.phases),
            ContextStateStore(RecordDict()),
            build_part(recipe, "strategy.client_sides", tensors),
            personal=TensorSelector(recipe.strategy.personal),
        )
        self.server: dict[str, ServerSide] = build_part(recipe, "strategy.server_sides", tensors)
        for side in self.server.values():
            side.init(self.shared())
        self.round = 0

    def shared(self) -> dict[str, torch.Tensor]:
        arrays = map(torch.from_numpy, self.client.get_parameters({}))
        return dict(zip(self.client.shared_names, arrays, strict=True))

    def train(self) -> int:
        """Take a round; return the number of steps."""
        self.round += 1
        before = self.shared()
        self.client.received = {
            name: values
            for side in self.server.values()
            for name, values in side.broadcast(0).items()
        }
        config = {"round": self.round, "state-round": self.round - 1, "lr": 0.1}
        _, examples, metrics = self.client.fit([value.numpy() for value in before.values()], config)
        update, steps = subtract(self.shared(), before), metrics["num-steps"]
        sent = {
            name: {key: value.cpu() for key, value in values.items()}
            for name, values in self.client.sent.items()
        }
        reply = Reply(0, examples, steps, metrics["lr-sum"], update, sent)
        for side in self.server.values():
            side.reduce([reply], update, Cohort(self.round, 1, 1))
        return steps


def watched(*args: Any) -> Any:
    found.clear()
    with Methods(), Operators():
        return train_locally(*args)


@pytest.mark.parametrize("words", METHODS, ids=name_of)
def test_no_step_reads_a_value_back(words, monkeypatch):
    """In the second round, in which every method is at work."""
    monkeypatch.setattr(client_module, "train_locally", watched)
    federations = [Federation(words, steps) for steps in (RARELY, OFTEN)]
    for federation in federations:
        federation.train()
    few, rarely = federations[0].train(), Counter(found)
    many, often = federations[1].train(), Counter(found)
    assert many == 3 * few
    assert often == rarely, f"in {many - few} more steps: {often - rarely}"
    assert rarely["aten._local_scalar_dense.default"] >= 1  # the mean loss, at the end


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", METHODS, ids=name_of)
def test_on_a_gpu_no_step_synchronises(words):
    """PyTorch's own word, from a pass's first batch to its last step; a copy by ``to`` counts."""
    federation = Federation(words, OFTEN, "cuda")
    federation.train()
    data = federation.client.data
    batches = data.batches

    def strictly(*args: Any, **how: Any) -> Iterator[Batch]:
        try:
            for batch in batches(*args, **how):
                torch.cuda.set_sync_debug_mode("error" if how["train"] else "default")
                yield batch
        finally:
            torch.cuda.set_sync_debug_mode("default")

    data.batches = strictly
    assert federation.train() > 1
