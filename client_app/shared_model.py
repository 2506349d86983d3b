"""The model that the clients of one process use, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedhet.strategies.base import ClientData, ClientSide, LocalOptimizer, Tensors, laid_out
from fedhet.strategies.components.local_training_config import LocalTrainingConfig
from fedhet.strategies.components.tensor_selection import (
    TensorSelector,
    personal_names,
    shared_names,
    tensors_of,
    trainable_shared,
)
from fedhet.strategies.wire.compressed_records import Received
from fedhet.strategies.wire.compression import Compression
from fedhet.tasks.metrics import MetricSet
from fedhet.tasks.models.attributes import PlainAttributes


@dataclass
class SharedModel:
    """A model, and how all clients train and evaluate it.

    What one client leaves in the model, the next one does not find (:meth:`reset`, :meth:`load`).
    """

    model: nn.Module  # on its device; ``forward`` returns (features, logits)
    loss: Callable[[Tensor, Tensor], Tensor]  # mean task loss of (logits, labels)
    options: LocalTrainingConfig = field(default_factory=LocalTrainingConfig)
    seed: int = 0  # of the run: with round and id it seeds batches, augmentation and dropout
    # tensors that are kept in the client state and never sent
    personal: TensorSelector = field(default_factory=lambda: TensorSelector("none"))
    test_data: ClientData | None = None  # the global test set, in a simulation
    # builds a freshly initialised model of a seed, for ``options.initial="own"``
    build: Callable[[int], nn.Module] | None = None
    metrics: MetricSet | None = None  # what evaluations measure beside loss and accuracy
    compression: Compression = field(default_factory=Compression)  # of train messages
    decoded: Received | None = None  # x, as the last message to a client of this model had it
    loaded: Tensors = field(default_factory=dict, init=False)  # what :meth:`load` has put in last

    def __post_init__(self) -> None:
        """Find the tensors that travel, those that stay, and what the model holds beside them."""
        self.params = dict(self.model.named_parameters())
        self.tensors = tensors_of(self.model)
        self.shared_names = shared_names(self.model, self.personal)
        self.personal_names = set(personal_names(self.model, self.personal))
        self.buffer_names = {name for name, _ in self.model.named_buffers()}
        self.untrained = self.options.untrained(self.params)
        own = self.tensors.keys() - set(self.shared_names)
        self.initial = {name: self.tensors[name].clone() for name in own}
        self._trained = {name: param.requires_grad for name, param in self.params.items()}
        # What no state holds begins each message anew: the next may be another client's.
        self._passing = {
            name: value.clone()
            for name, value in self.model.named_buffers()
            if name not in self.tensors
        }
        self._as_model: tuple[Tensors, Tensors] = ({}, {})  # x as received, and laid out
        self._attributes = PlainAttributes(self.model.modules())
        self._is_checked = False

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(iter(self.params.values())).device

    def check(self, optimizer: LocalOptimizer, sides: Mapping[str, ClientSide]) -> None:
        """Check the first client's sides: those of the others are like them."""
        if not self._is_checked:
            shared = trainable_shared(self.model, self.personal)
            for side in sides.values():
                side.check(self.model, optimizer, shared)
            self._is_checked = True

    def reset(self) -> None:
        """Prepare the model for another client."""
        if not self.model.training:
            self.model.train()
        for name, param in self.params.items():
            param.grad = None
            param.requires_grad_(self._trained[name])

    def travelling(self) -> tuple[Tensors, Tensors]:
        """Return the tensors that travel, live: the trained ones, and the buffers."""
        shared = {name: self.tensors[name] for name in self.shared_names}
        buffers = {name: value for name, value in shared.items() if name in self.buffer_names}
        return {name: v for name, v in shared.items() if name not in buffers}, buffers

    def as_model(self, received: Tensors) -> Tensors:
        """Return x laid out as the model is, on a CPU; copied once for all who receive the same."""
        if self.device.type != "cpu":
            return received
        if self._as_model[0] is not received:
            self._as_model = received, laid_out(received, self.tensors)
        return self._as_model[1]

    def load(self, shared: Tensors, own: Tensors) -> None:
        """Load the tensors that travel and those that stay; all else is as it was at first."""
        values = {**shared, **self.initial, **own}
        self.put(values)
        self.loaded = values if self.device.type == "cpu" else self.copies(values)
        for name, value in self._passing.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(owner), leaf, value.clone())
        self._attributes.put_back()

    @torch.no_grad()
    def put(self, values: Tensors) -> None:
        """Copy values into some of the tensors."""
        for name, value in values.items():
            self.tensors[name].copy_(value)

    def copies(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return copies of some of the tensors."""
        return {name: self.tensors[name].clone() for name in names}

    @torch.no_grad()
    def change_since(self, received: Tensors) -> dict[str, Tensor]:
        """Return y_i - x of the tensors that travel, in host memory; ``received`` is x."""
        return {
            name: torch.sub(self.tensors[name].cpu(), x, out=torch.empty_like(x))
            for name, x in ((name, received[name]) for name in self.shared_names)
        }
