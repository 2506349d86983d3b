"""Seconds of a client's epoch of a method over FedAvg's, in one run on one machine.

    FEDHET_DATA=... python -m benchmarks epoch METHOD ... [--words local=adam task.model=feddw_cnn]

One client trains for an epoch by ``train_locally``, with its optimizer, client halves and payloads,
on 5,000 examples in one thread. Every measurement stands between two of FedAvg, and methods take
turns. A METHOD is the name of a strategy, with further words of its recipe if need be:
"fedmrur strategy.sam.rho=0.05". FedDW's head has no bias: add task.head_bias=false to ``--words``,
so that FedAvg's has none either. "begin" and "end" of the halves are timed apart, as a share of
five epochs. "plain" is a loop in PyTorch's own words on the same images, without augmentation: add
task.flip=false task.crop_padding=0 to ``--words``, and device=cuda for a GPU. FedDW's Table III:
``local=adam task.model=feddw_cnn``; FedMRUR's Table 11: ``local.lr=0.1 local.batch_size=50
local.weight_decay=0.0005 local.clip=10 task.model=gn_cnn``.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn import functional as F

from benchmarks.harness import in_turns, options_of, save, spread
from fedhet.conf import build_local_optimizer, compose, plain_part
from fedhet.conf.build import strategy_parts
from fedhet.strategies.base import ClientSide, LocalContext
from fedhet.strategies.components.local_training import train_locally
from fedhet.strategies.components.local_training_config import local_training_config
from fedhet.strategies.components.tensor_selection import TensorSelector, shared_names
from fedhet.tasks import build_task, keep_freed_memory, make_repeatable, pick_device

CLIENTS, SEED, EPOCHS_OF_A_ROUND = 10, 0, 5


class TimedClient:
    """A client of a recipe's method, from round to round.

    Args:
        recipe: of the method; its ``device`` counts.
    """

    def __init__(self, recipe: DictConfig) -> None:
        self.recipe, self.around = recipe, []
        self.device = pick_device(str(recipe.device))
        make_repeatable(self.device)
        self.state: dict[str, Any] = {}  # from round to round
        parts = plain_part(recipe, "task"), plain_part(recipe, "partition")
        self.task = build_task(*parts, seed=SEED, num_clients=CLIENTS)
        how = {"device": self.device, "channels_last": bool(recipe.runtime.channels_last)}
        self.data = self.task.client_data(0, **how)[0]
        self.model = self.task.build_model(SEED).to(self.device)
        tensors = self.task.classifier_tensors
        if how["channels_last"]:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = build_local_optimizer(recipe, tensors)
        method = strategy_parts(recipe, tensors)
        self.sides: Sequence[ClientSide] = list(method.client_sides.values())
        for side in self.sides:
            side.check(self.model, self.optimizer, [n for n, _ in self.model.named_parameters()])
        self.initial = {n: value.clone() for n, value in self.model.state_dict().items()}
        self.shared = shared_names(self.model, TensorSelector(recipe.strategy.personal))
        names = {name for name, _ in self.model.named_parameters()}
        anchor = {name: self.initial[name] for name in self.shared if name in names}
        self.received = {}
        for half in method.server_sides.values():
            half.init(anchor)
            self.received |= half.broadcast(0)

    def epoch(self) -> float:
        """Return the seconds of an epoch, always on the same batches."""
        self.model.load_state_dict(self.initial)
        config = local_training_config(self.recipe.local, self.recipe.strategy.phases)
        context = LocalContext(
            model=self.model,
            loaded=self.initial,
            shared=self.shared,
            received=self.received,
            state=self.state,
            data=self.data,
            loss=self.task.loss,
            round=2,
            batch_size=config.batch_size,
            lr=float(self.recipe.local.lr),
        )
        sides, order = copy.deepcopy(self.sides), torch.Generator().manual_seed(SEED)
        begin, _ = seconds(lambda: [side.begin(context) for side in sides])
        taken, (summary, _) = seconds(
            lambda: train_locally(context, sides, self.optimizer, config, order)
        )
        end, _ = seconds(lambda: [side.end(context, summary) for side in sides])
        self.around.append((begin + end) / (EPOCHS_OF_A_ROUND * taken))
        return taken


class PlainLoop(TimedClient):
    """SGD on FedAvg's client in PyTorch's own words, without augmentation."""

    def epoch(self) -> float:
        """Return the seconds of an epoch, always on the same batches."""
        self.model.load_state_dict(self.initial)
        self.model.train()
        self.around.append(0.0)
        return seconds(self._train)[0]

    def _train(self) -> None:
        local = self.recipe.local
        [(images, labels)] = self.data.batches(len(self.data), generator=None, train=False)
        params = list(self.model.parameters())
        optimizer = torch.optim.SGD(
            params, local.lr, local.momentum, weight_decay=local.weight_decay
        )
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
        total = torch.zeros((), device=self.device)
        for chosen in order.to(self.device).split(local.batch_size):
            optimizer.zero_grad()
            with torch.autocast(self.device.type, torch.bfloat16, enabled=local.autocast):
                _, logits = self.model(images[chosen])
                loss = F.cross_entropy(logits, labels[chosen])
            loss.backward()
            if local.clip is not None:
                nn.utils.clip_grad_norm_(params, local.clip)
            optimizer.step()
            total += loss.detach()
        float(total)


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return how long it takes, and what it returns."""
    began = time.perf_counter()
    result = work()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began, result


def main() -> None:
    """Measure, print, write."""
    parser = options_of(__doc__, "epoch", repeats=20)
    parser.add_argument("methods", nargs="+", metavar="METHOD")
    parser.add_argument("--words", nargs="+", default=[], help="further words of every recipe")
    parser.add_argument("--task", default="cifar10")
    parser.add_argument("--examples", type=int, default=5000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    common = [f"task={options.task}", f"task.train_size={CLIENTS * options.examples}"]
    common += [f"clients={CLIENTS}", "partition=iid", "runtime=local", "local.epochs=1"]

    def client(method: str) -> TimedClient:
        if method == "plain":
            return PlainLoop(compose({"overrides": json.dumps([*common, *options.words])}))
        strategy, *own = method.split()
        words = [*common, *options.words, f"strategy={strategy}", *own]
        return TimedClient(compose({"overrides": json.dumps(words)}))

    base, clients = client("fedavg"), {method: client(method) for method in options.methods}
    for one in (base, *clients.values()):
        one.epoch()  # warms up, and leaves what a method needs of an earlier round
    found = in_turns(base.epoch, {m: c.epoch for m, c in clients.items()}, options.repeats)
    for method, figures in found.items():
        figures["begin_and_end"] = clients[method].around
        print(
            f"{method}: {spread(figures['seconds'])} s, {spread(figures['ratios'])} times FedAvg; "
            f"begin and end {100 * max(figures['begin_and_end']):.1f} % of five epochs at most"
        )
    save(options.out, {"words": options.words, "methods": found})
