"""A local step does not synchronise: values are read back from the device once a round.

On the CPU, operators are counted inside ``train_locally`` that would drain a GPU's queue: the host
reads a number or a shape out of a tensor or writes one into it. A pass and a round may have some,
so two steps are compared with six in as many passes. The last test sees copies by ``to``, too.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedhet.client_app import client as client_module
from fedhet.conf import build_local_optimizer, compose, plain_part
from fedhet.conf.build import strategy_parts
from fedhet.server_app.assembly import server_model_of
from fedhet.strategies.base import Batch, LocalContext
from fedhet.strategies.components.local_training import train_locally
from fedhet.strategies.components.local_training_config import local_training_config
from fedhet.tasks import build_task
from tests.federation import federate
from tests.recipes import TINY, overrides
from tests.strategies.sides import built
from tests.test_every_strategy import METHODS, name_of, param

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
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in READING or (func in MASKED and any(map(is_mask, args[1]))):
            found[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Methods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in UNSEEN:
            found[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def train_two_rounds(words: list[str], steps: int, device: str = "cpu") -> None:
    recipe = compose(overrides(*WORDS, *words))
    clients = int(recipe.clients)
    config = plain_part(recipe, "task") | {"train_size": clients * BATCH * steps}
    task = build_task(config, plain_part(recipe, "partition"), seed=0, num_clients=clients)
    tensors = task.classifier_tensors
    parts = strategy_parts(recipe, tensors)
    sides = {"client_sides": parts.client_sides, "server_sides": parts.server_sides}
    network = server_model_of(task, task.build_model(0).to(device))
    federate(
        built(**sides, server_model=network),
        [task.client_data(0, device)[0]],
        model=lambda: task.build_model(0).to(device),
        loss=task.loss,
        rounds=2,
        optimizer=lambda: build_local_optimizer(recipe, tensors),
        options=local_training_config(recipe.local, recipe.strategy.phases),
        personal=recipe.strategy.personal,
    )


@pytest.mark.parametrize("words", map(param, METHODS))
def test_no_step_reads_a_value_back(words, monkeypatch):
    rounds: list[tuple[int, Counter[str]]] = []

    def watched(*args: Any) -> Any:
        found.clear()
        with Methods(), Operators():
            summary, loss = train_locally(*args)
        rounds.append((summary.num_steps, Counter(found)))
        return summary, loss

    monkeypatch.setattr(client_module, "train_locally", watched)
    for steps in (RARELY, OFTEN):
        train_two_rounds(words, steps)
    _, (few, rarely), _, (many, often) = rounds
    assert many == 3 * few
    assert often == rarely, f"in {many - few} more steps: {often - rarely}"
    assert rarely["aten._local_scalar_dense.default"] >= 1  # the mean loss, at the end


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("words", METHODS, ids=name_of)
def test_on_a_gpu_no_step_synchronises(words, monkeypatch):
    """PyTorch's own word, from a pass's first batch to its last step; a copy by ``to`` counts."""

    def strict(context: LocalContext, *args: Any) -> Any:
        batches = context.data.batches

        def watched(*args: Any, **how: Any) -> Iterator[Batch]:
            try:
                for batch in batches(*args, **how):
                    torch.cuda.set_sync_debug_mode("error" if how["train"] else "default")
                    yield batch
            finally:
                torch.cuda.set_sync_debug_mode("default")

        if context.round == 2:  # the first may set up libraries
            context.data.batches = watched
        return train_locally(context, *args)

    monkeypatch.setattr(client_module, "train_locally", strict)
    train_two_rounds(words, OFTEN, "cuda")
