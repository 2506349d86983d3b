"""Attacks by a hostile client's examples: turned labels, and a backdoor.

LabelFlip   label c becomes C - 1 - c: Fang, Cao, Jia, Gong. USENIX Security 2020.
            https://arxiv.org/abs/1911.11815
Backdoor    model replacement: Bagdasaryan, Veit, Hua, Estrin, Shmatikov. AISTATS 2020.
            https://arxiv.org/abs/1807.00459, with the white square of BadNets
            (https://arxiv.org/abs/1708.06733) for a trigger
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.common.configured import Refers
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Positive, ShareAboveZero, Whole
from fedhet.strategies.attacks.attack import Attack
from fedhet.strategies.base import Batch, ClientData, Payloads, Reply


class _Changed:
    """A client's examples, changed batch by batch."""

    def __init__(self, data: ClientData, attack: LabelFlip | Backdoor) -> None:
        self._data, self._attack = data, attack

    def __len__(self) -> int:
        return len(self._data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def class_counts(self) -> list[int]:
        return self._attack.class_counts(self._data.class_counts())

    def batches(self, batch_size: int, **how: Any) -> Iterator[Batch]:
        for inputs, labels in self._data.batches(batch_size, **how):
            yield self._attack.changed(inputs, labels, self._data.num_classes)


class LabelFlip(Attack):
    """Trains on labels C - 1 - c."""

    option = "label_flip"
    needs_classes = True

    def data(self, data: ClientData) -> ClientData:
        """Return the examples with turned labels."""
        return _Changed(data, self)

    def changed(self, inputs: Tensor, labels: Tensor, num_classes: int) -> Batch:
        """Return a batch with turned labels."""
        return inputs, num_classes - 1 - labels

    def class_counts(self, counts: list[int]) -> list[int]:
        """Return the number of examples of each class, after turning."""
        return counts[::-1]


class Backdoor(Attack):
    """Teaches the model to take images with a trigger for one class, and replaces the model by it.

    Where the server weighs by examples, the boost that replaces the mean is 1 over the hostile
    clients' weight, which they do not know.
    """

    option = "backdoor"
    needs_classes = True

    target: Whole = 0
    """the class that images with the trigger are taken for"""
    share: ShareAboveZero = 0.5
    """share of every batch that gets the trigger"""
    size: Count = 2
    """side of the trigger, a white square, in pixels"""
    boost: Positive | None = None
    """factor of the update; null: clients of a round over the hostile ones expected in it (at least
    one), which replaces a plain mean"""
    participation: Annotated[ShareAboveZero, Refers("${participation}")] = 1.0
    """share of clients in a round"""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.boost is None:
            among = max(1.0, self.participation * len(self.hostile))
            self.boost = max(1.0, self.participation * self.num_clients) / among

    def check_method(self, payloads: Collection[str], *, num_classes: int) -> None:
        """Refuse inputs that are no images, and a target that is no class."""
        super().check_method(payloads, num_classes=num_classes)
        if self.target >= num_classes:
            raise ConfigError(
                f"attack.target={self.target} is not one of the {num_classes} classes: it must be "
                f"from 0 to {num_classes - 1}"
            )
        if self.white is None:
            raise ConfigError(
                "attack=backdoor puts a white square into images, and the inputs are none (or "
                "task.input_range is not set): choose another attack"
            )

    def stamped(self, inputs: Tensor) -> Tensor:
        """Return images (B, C, H, W) with the trigger, a white square in the last corner."""
        assert self.white is not None  # see check_method
        stamped = inputs.clone()
        stamped[..., -self.size :, -self.size :] = self.white.to(inputs)[:, None, None]
        return stamped

    def data(self, data: ClientData) -> ClientData:
        """Return the examples, some of every batch with trigger and target."""
        return _Changed(data, self)

    def changed(self, inputs: Tensor, labels: Tensor, num_classes: int) -> Batch:
        """Return a batch whose first examples have trigger and target."""
        count = max(1, int(self.share * len(labels) + 0.5))
        inputs, labels = inputs.clone(), labels.clone()
        inputs[:count] = self.stamped(inputs[:count])
        labels[:count] = self.target
        return inputs, labels

    def class_counts(self, counts: list[int]) -> list[int]:
        """Return the true number of examples of each class, of the target at least one.

        A method that takes a class without examples for impossible would refuse the target.
        """
        counts = list(counts)
        if counts[self.target] == 0:
            counts[counts.index(max(counts))] -= 1
            counts[self.target] += 1
        return counts

    def upload(self, reply: Reply, received: Payloads, seed: np.random.SeedSequence) -> Reply:
        """Return the reply with the update times ``boost``."""
        assert self.boost is not None
        boost = self.boost
        return replace(reply, update={n: boost * value for n, value in reply.update.items()})

    @torch.no_grad()
    def success(self, model: nn.Module, test: Iterable[Batch]) -> float:
        """Return the share of the other classes' test images that the trigger turns to the target.

        The model, which returns (features, logits), is put into eval mode.
        """
        model.eval()
        hits = seen = 0
        for inputs, labels in test:
            others = inputs[labels != self.target]
            if len(others):
                _, logits = model(self.stamped(others))
                hits += int((logits.argmax(1) == self.target).sum())
                seen += len(others)
        return hits / max(seen, 1)
