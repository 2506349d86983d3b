"""conf/task/*.yaml as checked values; those files explain every key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar, Self, get_type_hints

from fedhet.common.errors import (
    ConfigError,
    is_list,
    require_choice,
    require_finite,
    require_known_keys,
    require_range,
    require_types,
    require_whole,
)
from fedhet.common.metrics import Kind
from fedhet.tasks.losses import BALANCED, KINDS, LOSSES
from fedhet.tasks.models import CONDITIONAL
from fedhet.tasks.transform import NoTransform, Transform
from fedhet.tasks.vocabulary import SPECIAL_TOKENS

WEIGHTED = tuple(LOSSES["classification"])
NAMED = ("path", "target", "client_column")  # arguments of a data function with a key of their own


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """What every task has."""

    name: str
    model: str
    inputs: str = "images"
    path: str | None = None
    client_column: str | None = None
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    classifier: str | None = None
    head_bias: bool | None = None
    head_init: str | None = None
    model_options: Mapping[str, Any] | None = None
    lora: Mapping[str, Any] | None = None
    loss: str | None = None
    class_weights: str | tuple[float, ...] | None = None

    @classmethod
    def from_mapping(cls, task: Mapping[str, Any]) -> Self:
        """Check a plain mapping."""
        require_known_keys("task", task, [field.name for field in fields(cls)])
        required = [field.name for field in fields(cls) if field.default is MISSING]
        if missing := sorted(set(required) - set(task)):
            raise ConfigError(f"the task lacks task.{', task.'.join(missing)}")
        values = dict(task)
        if is_list(values.get("classes")):  # a class's name may be 0
            values["classes"] = [str(name) for name in values["classes"]]
        options = [key for key in values if key.endswith("_options") or key == "lora"]
        plain = {key: value for key, value in values.items() if key not in options}
        require_types("task", plain, get_type_hints(cls))
        for key, value in values.items():
            if is_list(value):
                values[key] = tuple(value)
        return cls(**values)

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.classes is not None and self.num_classes not in (None, len(self.classes)):
            raise ConfigError(
                f"task.classes names {len(self.classes)} classes, but "
                f"task.num_classes={self.num_classes}: change one of them"
            )
        twice = sorted(name for name, times in Counter(self.classes).items() if times > 1)
        if twice:
            raise ConfigError(f"task.classes names {', '.join(twice)} more than once")
        if self.class_names is not None and self._classifies and len(self.class_names) < 2:
            raise ConfigError(
                f"task.classes=[{','.join(self.class_names)}] must name at least two classes: with "
                "fewer a model has nothing to learn"
            )

        self._check_weights()

    def _check_weights(self) -> None:
        weights = self.class_weights
        if weights is None:
            return
        if not self._classifies or (self.loss is not None and self.loss not in WEIGHTED):
            raise ConfigError(
                f"task.class_weights={weights}: weights are for task.loss=cross_entropy and focal "
                "of a classification: set task.class_weights=null"
            )
        if isinstance(weights, str):
            require_choice("task.class_weights", weights, (BALANCED,))
            return
        for weight in weights:
            require_range("task.class_weights", weight, open_high=True)
        if self.class_names is not None and len(weights) != len(self.class_names):
            raise ConfigError(
                f"task.class_weights has {len(weights)} weights, and there are "
                f"{len(self.class_names)} classes: give one for each, in their order"
            )

    @property
    def _classifies(self) -> bool:
        """Whether the model distinguishes classes."""
        return True

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes in the order of their labels; None: the data folder's."""
        if self.classes is None and self.num_classes is not None:
            return tuple(str(label) for label in range(self.num_classes))
        return self.classes


@dataclass(frozen=True, kw_only=True)
class SourceConfig(TaskConfig):
    """A task on a data set that fedhet reads; each kind of inputs adds its own keys."""

    sources: ClassVar[tuple[str, ...]]

    source: str
    hub: str | None = None
    label_column: str = "label"
    train_split: str = "train"
    test_split: str | None = "test"
    test_fraction: float = 0.2
    train_size: int | None = None
    test_size: int | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        require_choice("task.source", self.source, self.sources)
        require_range(
            "task.test_fraction", self.test_fraction, high=1.0, open_low=True, open_high=True
        )
        for key in ("train_size", "test_size"):
            if getattr(self, key) is not None:
                require_whole(f"task.{key}", getattr(self, key), low=1)

    def require_shared_meaning(self) -> None:
        """Require the values that sites with their own data must agree on."""
        if self.class_names is None:
            raise ConfigError(
                "with partition=site the sites must agree on the classes: list them in task.classes"
            )


@dataclass(frozen=True, kw_only=True)
class ImageConfig(SourceConfig):
    """A task on images."""

    sources: ClassVar[tuple[str, ...]] = ("embedded", "hub", "files", "image_folder")

    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    image_column: str = "image"
    flip: bool = False
    crop_padding: int = 0
    crop_probability: float = 1.0
    stem: str | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        if self.channels not in (1, 3):
            raise ConfigError(f"task.channels={self.channels} must be 1 (grey) or 3 (RGB)")
        if self.source == "embedded" and self.path is not None:
            raise ConfigError(
                f"task.path={self.path}: task.source=embedded has its own images; set "
                "task.path=null, or choose another task.source, such as image_folder"
            )
        if self.source in ("embedded", "image_folder") and self.hub is not None:
            raise ConfigError(
                f"task.hub={self.hub}, but task.source={self.source} does not read the hub: set "
                "task.hub=null, or task.source=hub"
            )
        require_whole("task.image_size", self.image_size, low=1)
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise ConfigError(
                    f"task.{key} has {len(values)} values, but task.channels={self.channels}: "
                    "give one value per channel"
                )
        for value in self.mean:
            require_finite("task.mean", value)
        for value in self.std:
            require_range("task.std", value, open_low=True, open_high=True)
        if self.model in CONDITIONAL and ({*self.mean}, {*self.std}) != ({0.0}, {1.0}):
            raise ConfigError(
                f"task.model={self.model} needs pixels in [0, 1], but task.mean={list(self.mean)}, "
                f"task.std={list(self.std)}: set every mean to 0.0 and every std to 1.0"
            )
        require_whole("task.crop_padding", self.crop_padding)
        require_range("task.crop_probability", self.crop_probability, high=1.0)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.channels, self.image_size, self.image_size

    @property
    def transform(self) -> Transform:
        """Augmentation and normalisation of raw pixels."""
        return Transform(self.mean, self.std, self.flip, self.crop_padding, self.crop_probability)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments of ``build_model`` for images only."""
        return {"stem": self.stem}


@dataclass(frozen=True, kw_only=True)
class TextConfig(SourceConfig):
    """A task on texts of words from a vocabulary."""

    sources: ClassVar[tuple[str, ...]] = ("hub", "files")

    length: int
    vocabulary_size: int
    vocabulary_file: str | None = None
    text_column: str = "text"

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        require_whole("task.length", self.length, low=2)  # the start token and a word
        require_whole("task.vocabulary_size", self.vocabulary_size, low=SPECIAL_TOKENS + 1)

    @property
    def input_shape(self) -> tuple[int]:
        """(T,)."""
        return (self.length,)

    @property
    def transform(self) -> NoTransform:
        """Copies tokens to the device."""
        return NoTransform()

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments of ``build_model`` for texts only."""
        return {"vocabulary_size": self.vocabulary_size}

    def require_shared_meaning(self) -> None:
        """Require the values that sites with their own data must agree on."""
        super().require_shared_meaning()
        if self.vocabulary_file is None:
            raise ConfigError(
                "with partition=site the sites must agree on the vocabulary: set "
                "task.vocabulary_file to the same file everywhere (one word per line, by rank; a "
                "run on one machine writes vocabulary.txt beside the tokens in the cache folder)"
            )


@dataclass(frozen=True, kw_only=True)
class OwnConfig(TaskConfig):
    """A task on data that a user's own function returns."""

    data: str
    target: str | None = None
    kind: Kind = "classification"
    test_data: str | None = None
    data_options: Mapping[str, Any] | None = None
    columns: tuple[str, ...] | None = None
    input_shape: tuple[int, ...] | None = None
    input_range: tuple[float, ...] | None = None
    transform: ClassVar[NoTransform] = NoTransform()

    @property
    def _classifies(self) -> bool:
        return self.kind == "classification"

    @property
    def arguments(self) -> dict[str, Any]:
        """The data function's arguments that the recipe has."""
        named = {key: getattr(self, key) for key in NAMED}
        given = {key: value for key, value in named.items() if value is not None}
        return given | dict(self.data_options or {})

    @property
    def outputs(self) -> int:
        """The number of outputs that one of fedhet's models must have."""
        if self.kind == "regression":
            return 1
        if self.class_names is None:
            raise ConfigError(
                f"task.num_classes=null: task.model={self.model} is one of fedhet's and needs it"
            )
        return len(self.class_names)

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        require_choice("task.kind", self.kind, KINDS)
        for key in NAMED:
            if key in (self.data_options or {}):
                raise ConfigError(f"task.data_options.{key}: the key is task.{key} now")
        if self.columns is not None and len(self.columns) != 2:
            raise ConfigError(
                f"task.columns={list(self.columns)} must be two names, of the input and the target"
            )
        if self.input_range is not None and len(self.input_range) != 2:
            raise ConfigError(
                f"task.input_range={list(self.input_range)} must be two numbers, of black and white"
            )
        if self.kind == "regression" and (self.num_classes or self.classes):
            raise ConfigError(
                "task.kind=regression has no classes: set task.num_classes=null and "
                "task.classes=null"
            )


AnyConfig = ImageConfig | TextConfig | OwnConfig
INPUTS: dict[str, type[AnyConfig]] = {"images": ImageConfig, "text": TextConfig, "own": OwnConfig}


def read_config(task: Mapping[str, Any]) -> AnyConfig:
    """Check a plain mapping; ``task.inputs`` decides which keys it has.

    Raises:
        ConfigError: for an unknown or missing key, or a value out of range.
    """
    inputs = task.get("inputs", "images")
    require_choice("task.inputs", inputs, INPUTS)
    return INPUTS[inputs].from_mapping(task)
