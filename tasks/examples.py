"""The examples that clients and server read, from a user's own data function.

Arrays ``(inputs, targets)`` (NumPy or torch) are on the device as a whole. A torch ``Dataset``, or
that of a ``DataLoader``, is read example by example, so that its own transforms act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)
from torch.utils.data import Dataset as TorchDataset

from fedhet.common.checksums import sha256_of
from fedhet.common.errors import ConfigError
from fedhet.tasks.tensor_data import order_of

Clients = NDArray[np.str_] | None
IGNORED = -100  # as in PyTorch: a pixel with this label counts in no loss and no metric
TARGETS = ("label", "labels", "target", "targets", "y", "fine_label", "mask")  # in a dict of two


class Examples:
    """Inputs and targets of one client, or of the test set.

    Args:
        given: ``(inputs, targets)``, a Dataset or a DataLoader.
        kind: classification, regression or segmentation.
        num_classes: C; 0 for regression.
        any_label: False: labels are 0 to C - 1, in a segmentation also IGNORED.
        columns: names of input and target, if an example is a dict.
        device: the batches' device.
        channels_last: yield batches of images in that memory format.

    Raises:
        ConfigError: for anything else, or if lengths or targets do not fit. A Dataset's targets are
            checked when they are read.
    """

    def __init__(
        self,
        given: Any,
        *,
        kind: str,
        num_classes: int,
        any_label: bool = False,
        columns: Sequence[str] | None = None,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
    ) -> None:
        self.kind, self._num_classes, self._any_label = kind, num_classes, any_label
        self.device, self._channels_last = torch.device(device), channels_last
        self._read = _reader(given, columns, self._check)
        if isinstance(self._read, _Arrays):
            self._read = self._read.to(self.device)
        self._targets: NDArray[Any] | None = None

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self._read)

    @property
    def num_bytes(self) -> int:
        """Bytes that are held on the device."""
        return self._read.num_bytes

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self._read.input_shape

    @property
    def num_classes(self) -> int:
        """C, the number of classes."""
        return self._num_classes

    def sha256(self) -> str | None:
        """Return the hash of all examples, with types and shapes; None for a Dataset."""
        return self._read.sha256()

    def targets(self) -> NDArray[Any]:
        """Return all targets (n, ...), read once."""
        if self._targets is None:
            self._targets = self._read.targets()
        return self._targets

    def class_counts(self) -> list[int]:
        """Return the number of examples of each class."""
        if self.kind != "classification":
            raise ConfigError(f"task.kind={self.kind} does not count examples by class")
        labels = self.targets()
        if labels.ndim != 1:
            raise ConfigError(
                f"the labels have the shape {labels.shape}: it must be (n,), one label per example"
            )
        counts = np.bincount(labels.astype(np.int64), minlength=self.num_classes)
        return [int(count) for count in counts]

    def batches(
        self,
        batch_size: int,
        *,
        generator: torch.Generator | None,
        train: bool,
        drop_last: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass of (inputs (B, ...), targets (B, ...)) in the order of a generator.

        A Dataset's random transforms must draw from torch's global generator, which is seeded for
        each client and round. ``drop_last`` leaves out a last, smaller batch unless it is the only
        one.
        """
        order = order_of(len(self), batch_size, generator, drop_last=drop_last).cpu()
        for chosen in torch.split(order, batch_size) if len(self) else ():
            inputs, targets = self._read.batch(chosen)
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            if self._channels_last and inputs.dim() == 4:
                inputs = inputs.contiguous(memory_format=torch.channels_last)
            yield inputs, self._typed(targets)

    def _check(self, targets: Tensor) -> None:
        """Reject labels that are not whole numbers, or not classes."""
        if targets.is_complex():
            raise ConfigError(
                f"the targets are {targets.dtype}: give their real and imaginary parts as two "
                "values (torch.view_as_real)"
            )
        if self.kind == "regression":
            _require_finite(targets.float())
        if self.kind == "regression" or targets.numel() == 0:
            return
        labels = targets.long()
        if targets.is_floating_point() and bool((cut := labels != targets).any()):
            raise ConfigError(
                f"the label {targets[cut][0].item():g} is not allowed: labels of "
                f"task.kind={self.kind} are whole numbers. Change the data, or set "
                "task.kind=regression"
            )
        if self.kind == "segmentation":
            labels = labels[labels != IGNORED]
        if self._any_label or labels.numel() == 0:
            return
        low, high = (int(end) for end in labels.aminmax())
        if not 0 <= low <= high < self.num_classes:
            raise ConfigError(
                f"labels run from {low} to {high}, but the model has {self.num_classes} outputs: "
                f"labels must be 0 to {self.num_classes - 1}. Change the data, the model or "
                "task.num_classes; null takes the outputs of the module task.classifier"
            )

    def _typed(self, targets: Tensor) -> Tensor:
        return targets.float() if self.kind == "regression" else targets.long()


class _Arrays:
    """Inputs and targets as tensors."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        if len(inputs) != len(targets):
            raise ConfigError(f"there are {len(inputs)} inputs and {len(targets)} targets")
        self.inputs = _single(inputs)
        self._targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def num_bytes(self) -> int:
        return self.inputs.numel() * self.inputs.element_size()

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    def sha256(self) -> str | None:
        parts = [one.cpu().contiguous() for one in (self.inputs, self._targets)]
        about = [f"{one.dtype} {tuple(one.shape)} ".encode() for one in parts]
        # one number counts as contiguous, whatever its stride, which its bytes must not have
        plain = torch.contiguous_format
        flat = [one if one.numel() > 1 else one.clone(memory_format=plain) for one in parts]
        content = [one.view(-1).view(torch.uint8).numpy().data for one in flat]
        return sha256_of(*about, *content)

    def to(self, device: torch.device) -> _Arrays:
        return _Arrays(self.inputs.to(device), self._targets.to(device))

    def targets(self) -> NDArray[Any]:
        return self._targets.cpu().numpy()

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        chosen = chosen.to(self.inputs.device)
        inputs = self.inputs[chosen]
        whole = not (inputs.is_floating_point() or inputs.is_complex())
        return inputs.long() if whole else inputs, self._targets[chosen]


class _Dataset:
    """A map-style Dataset and how its examples become a batch."""

    num_bytes = 0

    def __init__(
        self,
        dataset: TorchDataset[Any],
        collate: Callable[[list[Any]], Any],
        columns: Sequence[str] | None,
        check: Callable[[Tensor], None],
    ) -> None:
        self._dataset: Any = dataset
        self._collate, self._columns, self._check = collate, columns, check

    def __len__(self) -> int:
        return len(self._dataset)

    def sha256(self) -> str | None:
        return None

    @property
    def input_shape(self) -> tuple[int, ...]:
        if len(self) == 0:
            raise ConfigError("the data function gave no example that tells task.input_shape")
        return tuple(self.batch(torch.arange(1))[0].shape[1:])

    def targets(self) -> NDArray[Any]:
        steps = torch.split(torch.arange(len(self)), 256)
        return torch.cat([self.batch(chosen)[1] for chosen in steps]).numpy()

    def batch(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        rows = chosen.tolist()
        if hasattr(self._dataset, "__getitems__"):
            examples = self._dataset.__getitems__(rows)
        else:
            examples = [self._dataset[row] for row in rows]
        try:
            batch = self._collate(examples)
        except (TypeError, RuntimeError) as error:
            if self._collate is not default_collate:
                raise
            raise ConfigError(
                f"the Dataset's examples cannot be put into a batch: {error}. Give tensors of one "
                "shape (for images by transforms, such as Resize and ToTensor), or a DataLoader "
                "with a collate_fn. A pair of lists must be a tuple (inputs, targets)"
            ) from None
        inputs, targets = _pair(batch, self._columns)
        self._check(targets)
        return _single(inputs), targets


def _single(inputs: Tensor) -> Tensor:
    """Return inputs in float32 or complex64; a model of another type casts float32."""
    if inputs.is_complex():
        return inputs.to(torch.complex64)
    return inputs.float() if inputs.is_floating_point() else inputs


def _reader(
    given: Any, columns: Sequence[str] | None, check: Callable[[Tensor], None]
) -> _Arrays | _Dataset:
    if isinstance(given, DataLoader):
        _check_loader(given)
        return _Dataset(given.dataset, given.collate_fn, columns, check)
    if is_pair(given):
        inputs, targets = _numbers("inputs", given[0]), _numbers("targets", given[1])
        check(targets)
        return _Arrays(inputs, targets)
    # a data frame's items are columns
    if (
        isinstance(given, IterableDataset | Mapping)
        or hasattr(given, "iloc")
        or not (hasattr(given, "__getitem__") and hasattr(given, "__len__"))
    ):
        raise ConfigError(
            f"the data function gave a {type(given).__name__}: it must give a tuple of arrays "
            "(inputs, targets), a torch Dataset with a length, or a DataLoader of one"
        )
    return _Dataset(given, default_collate, columns, check)


def clients_of(given: Any, column: str | None) -> tuple[Any, Clients]:
    """Return what a data function gave without its clients, and whose each example is.

    They are the third of (inputs, targets, clients), an attribute ``clients`` of a Dataset, or a
    column of a data frame, of a Hugging Face Dataset or of examples that are dicts.
    """
    found: Any = getattr(given, "clients", None)
    if isinstance(given, tuple) and len(given) == 3:
        *pair, found = given
        given = tuple(pair)
    elif found is None and column is not None and given is not None:
        frame = given[0] if is_pair(given) else None
        if frame is not None and hasattr(frame, "iloc") and column in frame:
            found, given = frame[column], (frame.drop(columns=column), given[1])
        elif column in getattr(given, "column_names", ()):
            found = given[column]
        elif frame is None:
            dataset: Any = given.dataset if isinstance(given, DataLoader) else given
            found = [_client_in(dataset[row], column) for row in range(len(dataset))]
    return given, None if found is None else np.asarray(list(found)).astype(str)


def _client_in(example: Any, column: str) -> Any:
    if not isinstance(example, Mapping) or column not in example:
        has = ", ".join(map(str, example)) if isinstance(example, Mapping) else "no names"
        raise ConfigError(f"task.client_column={column}, but an example has {has}")
    return example[column]


def is_pair(given: Any) -> bool:
    """Return whether a data function gave arrays (inputs, targets).

    A list of two may also be a Dataset of two examples.
    """
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    return pair and (isinstance(given, tuple) or all(hasattr(one, "__array__") for one in given))


def _numbers(what: str, given: Any) -> Tensor:
    """Return a user's array, data frame or list as a tensor, sharing memory where it can."""
    if isinstance(given, Tensor):
        if given.layout != torch.strided:
            raise ConfigError(f"the {what} are a sparse tensor: give {what}.to_dense()")
        return given.detach()
    if isinstance(given, np.ma.MaskedArray) and np.ma.is_masked(given):
        raise ConfigError(f"the {what} have masked values: fill them, or remove their examples")
    try:
        values = _of_frame(given) if hasattr(given, "iloc") else np.asarray(given)
    except (ValueError, TypeError) as error:
        shapes = "inhomogeneous" in str(error)
        why = "their shapes differ: give them one shape" if shapes else f"{error}: give numbers"
        raise ConfigError(
            f"the {what} cannot become one array, because {why}, or a Dataset or a DataLoader "
            "whose collate_fn pads them"
        ) from None
    if values.ndim == 0 or values.dtype.kind not in "biufc":
        raise ConfigError(
            f"the {what} have the type {type(given).__name__} with elements of the type "
            f"{values.dtype}: they must be numbers in an array or list of n examples (labels of C "
            "classes: 0 to C - 1)"
        )
    widest = np.dtype(np.complex128 if values.dtype.kind == "c" else np.float64)
    if values.dtype.itemsize > widest.itemsize:  # longdouble, which torch lacks
        values = values.astype(widest)
    backwards = any(stride < 0 for stride in values.strides)  # torch supports neither
    if backwards or not values.dtype.isnative:
        values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
    # pandas locks its arrays, which torch warns of
    return torch.as_tensor(values if values.flags.writeable else values.copy())


def _of_frame(given: Any) -> NDArray[Any]:
    """Return pandas' numbers as one array, also for mixed and nullable types."""
    from pandas.api.types import is_numeric_dtype

    types = given.dtypes if given.ndim == 2 else [given.dtype]
    plain = np.asarray(given)
    if plain.dtype.kind in "biuf" or not all(map(is_numeric_dtype, types)):  # bool is numeric
        return plain
    return np.asarray(given.to_numpy(dtype=np.float64, na_value=np.nan))


def _require_finite(targets: Tensor) -> None:
    """Reject targets that are NaN or Inf, because then every loss would be."""
    if not targets.is_floating_point() or bool(targets.isfinite().all()):
        return
    row = int((~targets.isfinite()).nonzero()[0, 0])
    raise ConfigError(
        f"the target of example {row} (of those read at once) is {targets[row].tolist()}: "
        "remove examples without a target"
    )


def _check_loader(loader: DataLoader[Any]) -> None:
    """Reject a loader that does not draw each example of its dataset once."""
    batches = loader.batch_sampler
    sampler: object = loader.sampler if batches is None else batches
    if type(sampler) is BatchSampler:  # the user's hides its sampler from the loader
        sampler = sampler.sampler
    plain = type(sampler) in (RandomSampler, SequentialSampler) and not isinstance(
        loader.dataset, IterableDataset
    )
    if plain and not hasattr(loader.dataset, "__len__"):
        raise ConfigError(
            f"the data function gave a DataLoader of a {type(loader.dataset).__name__}: it must be "
            "of a torch Dataset with a length (__len__)"
        )
    whole = plain and len(sampler) == len(loader.dataset)  # type: ignore[arg-type]
    if not whole or getattr(sampler, "replacement", False):
        part = " of a part of them, or with repetitions" if plain else ""
        raise ConfigError(
            f"the DataLoader draws its examples with a {type(sampler).__name__}{part}, but fedhet "
            "draws them itself, so that the same seed gives the same bits: give its Dataset (a "
            "torch.utils.data.Subset for a part of it)"
        )


def _pair(batch: Any, columns: Sequence[str] | None) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a collated batch."""
    if isinstance(batch, Mapping):
        first, second = columns or _columns_of(batch)
        for name in (first, second):
            if name not in batch:
                raise ConfigError(
                    f"task.columns names {name}, but an example has {', '.join(map(str, batch))}"
                )
        batch = (batch[first], batch[second])
    if not (isinstance(batch, Sequence) and len(batch) == 2):
        raise ConfigError(
            f"a batch is a {type(batch).__name__}: it must be (inputs, targets), or a dict (whose "
            "two names go into task.columns)"
        )
    inputs, targets = batch
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        raise ConfigError(
            f"a batch's inputs and targets are {type(inputs).__name__} and "
            f"{type(targets).__name__}: both must be tensors"
        )
    return inputs, targets


def _columns_of(batch: Mapping[str, Any]) -> tuple[str, str]:
    targets = [name for name in batch if name in TARGETS]
    inputs = [name for name in batch if name not in TARGETS and isinstance(batch[name], Tensor)]
    if len(targets) != 1 or len(inputs) != 1:
        raise ConfigError(
            f"an example has {', '.join(map(str, batch))}: name its input and its target in "
            "task.columns, such as [image,label]"
        )
    return inputs[0], targets[0]
