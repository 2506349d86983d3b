"""Any data set of Hugging Face's hub or format, by name or folder, with its columns named.

Images become (C, H, W), texts the tokens (T,) of a Hugging Face tokenizer, and columns of numbers
stay as they are. If the name is a folder, nothing is downloaded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from fedhet.common.configured import Configured, InCode, Key, signature_of
from fedhet.common.errors import ConfigError, DamagedFileError, SetupError
from fedhet.common.kinds import Count, Positive, ShareBelowOne, Text
from fedhet.tasks.sources.arrays import random_split
from fedhet.tasks.sources.encodings import ImageEncoding, image_in

_KEY = "task.data_options"
_FILES = {"jsonl": "json", "json": "json", "csv": "csv", "parquet": "parquet"}
Arrays = tuple[NDArray[Any], ...]


class Splits(Configured):
    """A data set of Hugging Face's form, whose rows a subclass makes examples of."""

    section = _KEY

    path: Annotated[Text | None, Key("task.path")] = None
    """name on the hub, with a revision if there is one (``me/set@v2``), a folder that
    ``save_to_disk`` wrote, a folder that ``load_dataset`` reads, or a file (JSON, JSON lines, CSV,
    Parquet), whose one split is ``train``"""
    client_column: Annotated[Text | None, Key("task.client_column")] = None
    """column that says whose a row is"""
    subset: Text | None = None
    """name of the subset, if a data set on the hub has several"""
    train_split: Text = "train"
    """name of the training split"""
    test_split: Text | None = "test"
    """name of the test split; None: ``test_fraction`` of the training split"""
    test_fraction: ShareBelowOne = 0.2
    """always the same examples"""
    data_folder: Annotated[Path | None, InCode()] = None
    """a site's folder (``partition=site``), in place of ``path``; the server has none and gets no
    example"""

    @abstractmethod
    def none(self) -> Any:
        """Return no examples of the right shape."""

    @abstractmethod
    def examples(self, table: Any, place: str) -> Any:
        """Return a split's examples, decoded; ``place`` is for errors."""

    def splits(self) -> tuple[Any, Any]:
        """Return training and test examples."""
        place = self.path if self.data_folder is None else str(self.data_folder)
        if place is None:
            return self.none(), None
        splits = _open(place, self.subset)
        train = _split(splits, self.train_split, "train_split", place)
        if self.test_split is not None and (self.data_folder is None or self.test_split in splits):
            test = _split(splits, self.test_split, "test_split", place)
            return self.examples(train, place), self.examples(test, place)
        if self.data_folder is not None:
            return self.examples(train, place), None  # partition.holdout holds out some
        kept, split_off = (
            self.examples(train.select(rows), place)
            for rows in random_split(len(train), self.test_fraction)
        )
        return kept, split_off

    def clients(self, table: Any, place: str) -> NDArray[np.str_] | None:
        """Return whose each row is; None at a site, or if no column says it."""
        name = self.client_column
        if name is None or self.data_folder is not None:
            return None
        _require_column(table, name, "task.client_column", place)
        if None in (found := list(table[name])):
            raise ConfigError(f"{place} has a row without {name} (task.client_column)")
        return np.asarray(list(map(str, found)))


class HuggingFace(Splits):
    """A data set, and how its rows become examples."""

    input_column: Text = "image"
    """images, texts, or lists of numbers"""
    target: Annotated[Text, Key("task.target")] = "label"
    """column of the classes, or of a regression's targets. Texts, the names of a ``ClassLabel``,
    and True and False are found in ``classes`` by name, and so are numbers if ``classes`` are
    numbers. Otherwise numbers without names are places in ``classes``, from 0; so are all labels
    if ``classes`` are 0, 1, ... or None"""
    image_size: Count = 32
    """width and height in pixels that images are scaled to"""
    channels: Literal[1, 3] = 3
    """3: colour, 1: grey"""
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    """per channel, of pixels in [0, 1]"""
    std: Sequence[Positive] = (0.5, 0.5, 0.5)
    """per channel, of pixels in [0, 1]"""
    tokenizer: Text | None = None
    """folder or name of a Hugging Face tokenizer, for texts"""
    length: Count = 128
    """tokens of a text; longer texts are cut, shorter ones padded"""
    kind: Text = "classification"
    """classification or regression"""
    classes: Annotated[Sequence[str] | None, InCode()] = None
    """the classes in the order of the model's outputs"""

    def check_together(self) -> None:
        """Require a mean and a deviation for each channel."""
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise ConfigError(
                    f"{_KEY}.{name} has {len(values)} values, but {_KEY}.channels={self.channels}: "
                    "give one value per channel"
                )

    @cached_property
    def labels(self) -> Mapping[str, int] | None:
        """The label of each class."""
        if self.classes is None:
            return None
        return {str(name): label for label, name in enumerate(self.classes)}

    def none(self) -> Arrays:
        """Return no examples of the right shape."""
        shape = (self.channels, self.image_size, self.image_size)
        if self.tokenizer is not None:
            return np.zeros((0, self.length), dtype=np.int32), np.zeros(0, dtype=np.int64)
        return np.zeros((0, *shape), dtype=np.float32), np.zeros(0, dtype=np.int64)

    def examples(self, table: Any, place: str) -> Dataset[Any] | Arrays:
        """Return a split's examples, decoded, and clients if a column says whose they are."""
        import datasets

        clients = self.clients(table, place)
        _require_column(table, self.input_column, f"{_KEY}.input_column", place)
        _require_column(table, self.target, "task.target", place)
        targets = self._targets(table, place)
        feature = table.features[self.input_column]
        if isinstance(feature, datasets.Image):  # decoded here, as all images are
            table = table.cast_column(self.input_column, datasets.Image(decode=False))
            pixels = self._pixels(table[self.input_column])
            return Images(pixels, torch.from_numpy(targets), self.mean, self.std, clients)
        values = table[self.input_column]
        if getattr(feature, "dtype", "") in ("string", "large_string"):
            return with_clients((self._tokens(list(values)), targets), clients)
        try:
            numbers = np.asarray(list(values), dtype=np.float32)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{_KEY}.input_column={self.input_column} has {feature}: fedhet reads images, "
                "texts and lists of numbers, all of the same length"
            ) from None
        return with_clients((_finite(numbers, place), targets), clients)

    def _targets(self, table: Any, place: str) -> NDArray[Any]:
        given = list(table[self.target])
        if self.kind == "regression":
            numbers = [value for value in given if isinstance(value, (int, float))]
            if len(numbers) < len(given):
                raise ConfigError(
                    f"{place}: task.target={self.target} has values that are not "
                    "numbers, but task.kind=regression"
                )
            return np.asarray(numbers, dtype=np.float32)
        names = self._names(given, table.features[self.target], place)
        if names is None:
            return np.asarray(given, dtype=np.int64)
        labels = self.labels or {}
        if unknown := sorted(set(names) - labels.keys()):
            known = "null" if self.labels is None else f"[{','.join(labels)}]"
            raise ConfigError(
                f"{place}: the labels in task.target={self.target} are "
                f"{', '.join(unknown[:5])}, but task.classes={known}"
            )
        return np.asarray([labels[name] for name in names], dtype=np.int64)

    def _names(self, given: Sequence[Any], feature: Any, place: str) -> list[str] | None:
        """Return each label as ``task.classes`` names it; None: labels are places in that list."""
        import datasets

        column, classes = f"task.target={self.target}", list(self.labels or ())
        numbered = classes == list(map(str, range(len(classes))))  # also if there are none
        if isinstance(feature, datasets.ClassLabel):
            if any(value is None or value < 0 for value in given):
                raise ConfigError(f"{place}: {column} has rows without a label: remove them")
            # One rule for all sites and splits, whichever of the names occur there.
            if numbered and not set(feature.names) <= set(classes):
                return None
            return [feature.names[value] for value in given]
        if numbered and all(isinstance(value, int) for value in given):
            return None
        texts = list(map(str, given))
        if not all(type(value) is int for value in given):  # but texts, or True and False
            return texts
        digits = [name.removeprefix("-").isdecimal() for name in classes]
        if any(digits) and not all(digits):
            raise ConfigError(
                f"{place}: {column} has numbers, but task.classes=[{','.join(classes)}] has "
                "numbers and words: name all classes by numbers, or all by words in order"
            )
        return texts if any(digits) else None

    def _pixels(self, images: Any) -> Tensor:
        """Return images (n, C, H, W) as bytes."""
        encoding = ImageEncoding((self.channels, self.image_size, self.image_size))
        pixels = np.empty((len(images), *encoding.shape), dtype=np.uint8)
        for row, image in enumerate(images):
            place = f"{_KEY}.input_column={self.input_column}: row {row}"
            if image is None:
                raise ConfigError(f"{place} is empty")
            pixels[row] = encoding.decode(image_in(image), place)
        return torch.from_numpy(pixels)

    def _tokens(self, texts: list[str | None]) -> NDArray[np.int32]:
        """Return tokens (n, T)."""
        if self.tokenizer is None:
            raise ConfigError(
                f"{_KEY}.tokenizer=null, but {_KEY}.input_column={self.input_column} has texts: "
                "name a tokenizer"
            )
        if None in texts:
            row = texts.index(None)
            raise ConfigError(f"{_KEY}.input_column={self.input_column}: row {row} is empty")
        tokenizer = load_tokenizer(self.tokenizer)
        if not texts:
            return np.zeros((0, self.length), dtype=np.int32)
        found = tokenizer(
            texts,
            padding="max_length",
            truncation=True,
            max_length=self.length,
            return_attention_mask=False,
        )
        return np.asarray(found["input_ids"], dtype=np.int32)


def load(**given: Any) -> tuple[Any, Any]:
    """Return training and test examples; the arguments are those of :class:`HuggingFace`.

    Raises:
        ConfigError: for a missing data set, split or column, or labels that do not fit.
    """
    return HuggingFace(**given).splits()


load.__signature__ = signature_of(HuggingFace)  # type: ignore[attr-defined]


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Images that are held as bytes and normalised when they are read.

    Args:
        pixels: (n, C, H, W), in [0, 255].
        targets: (n,).
        mean: per channel, of pixels in [0, 1].
        std: per channel.
        clients: whose each image is, (n,); None if unknown.
    """

    def __init__(
        self,
        pixels: Tensor,
        targets: Tensor,
        mean: Sequence[float],
        std: Sequence[float],
        clients: NDArray[np.str_] | None = None,
    ) -> None:
        self._pixels, self._targets, self.clients = pixels, targets, clients
        self._mean = torch.tensor(mean)[:, None, None]
        self._std = torch.tensor(std)[:, None, None]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._pixels)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        """Return an image (C, H, W) and its target."""
        return (self._pixels[row] / 255 - self._mean) / self._std, self._targets[row]


def load_tokenizer(name: str, *, pads: bool = True) -> Any:
    """Return a Hugging Face tokenizer from a folder, or by its name on the hub.

    ``pads``: it must have a token for padding.

    Raises:
        ConfigError: if the tokenizer or transformers is missing, or it has no token for padding.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError:
        raise SetupError(
            f'{_KEY}.tokenizer={name} needs transformers: pip install -e ".[text]"'
        ) from None
    where, _, revision = name.partition("@")
    pinned = {"revision": revision} if revision else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(Path(where).expanduser()), **pinned)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_KEY}.tokenizer={name} cannot be loaded: {error}") from None
    if pads and tokenizer.pad_token_id is None:
        raise ConfigError(f"{_KEY}.tokenizer={name} has no token for padding (pad_token)")
    return tokenizer


def with_clients(pair: Arrays, clients: NDArray[np.str_] | None) -> Arrays:
    """Return (inputs, targets, clients), or without clients the pair."""
    return pair if clients is None else (*pair, clients)


def _require_column(table: Any, name: str, key: str, place: str) -> None:
    if name not in table.column_names:
        has = ", ".join(table.column_names)
        raise ConfigError(f"{place} has no column {name} ({key}); it has: {has}")


def _finite(numbers: NDArray[np.float32], place: str) -> NDArray[np.float32]:
    """Return rows of numbers; reject a row with a missing value, which would be NaN."""
    if len(wrong := np.argwhere(~np.isfinite(numbers))):
        raise ConfigError(
            f"{place}, row {wrong[0, 0]}: a number is missing, NaN, or Inf in float32: fill it, or "
            "remove the row"
        )
    return numbers


def _open(path: str, subset: str | None) -> Mapping[str, Any]:
    """Return the splits of a data set."""
    import datasets

    folder = Path(path).expanduser()
    saved = ("dataset_dict.json", "state.json")
    try:
        if folder.is_dir() and any((folder / name).is_file() for name in saved):
            found = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            found = datasets.load_dataset(str(folder), subset)
        elif folder.is_file() and (suffix := folder.suffix[1:].lower()) in _FILES:
            found = datasets.load_dataset(_FILES[suffix], data_files=str(folder))
        else:
            name, _, revision = path.partition("@")
            pinned = {"revision": revision} if revision else {}
            found = datasets.load_dataset(name, subset, **pinned)
    except Exception as error:  # offline, renamed, damaged: each library raises its own error
        raise DamagedFileError(
            f"task.path={path} cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    return found if isinstance(found, datasets.DatasetDict) else {"train": found}


def _split(splits: Mapping[str, Any], name: str, key: str, path: str) -> Any:
    if name not in splits:
        raise SetupError(f"{path} has no split {name} ({_KEY}.{key}); it has: {', '.join(splits)}")
    return splits[name]
