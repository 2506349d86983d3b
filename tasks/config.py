"""The group task as checked values; common/task_settings.py has its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

from fedhet.common.configured import checked_section
from fedhet.common.errors import ConfigError, require_choice
from fedhet.common.task_settings import ImageTask, OwnTask, TextTask
from fedhet.tasks.losses import BALANCED, LOSSES
from fedhet.tasks.models import CONDITIONAL, Head
from fedhet.tasks.transform import NoTransform, Transform

WEIGHTED = tuple(LOSSES["classification"])
NAMED = ("path", "target", "client_column")  # arguments of a data function with a key of their own


class ImageConfig(ImageTask):
    """A task on images."""

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W)."""
        return self.channels, self.image_size, self.image_size

    @property
    def transform(self) -> Transform:
        """Augmentation and normalisation of raw pixels."""
        how = self.flip, self.crop_padding, self.crop_padding_mode, self.crop_probability
        return Transform(tuple(self.mean), tuple(self.std), *how)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments of ``build_model`` for images only."""
        return {"stem": self.stem}

    def check(self) -> None:
        """Refuse values that do not fit each other."""
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
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise ConfigError(
                    f"task.{key} has {len(values)} values, but task.channels={self.channels}: "
                    "give one value per channel"
                )
        if self.crop_padding_mode == "reflect" and self.crop_padding >= self.image_size:
            raise ConfigError(
                f"task.crop_padding={self.crop_padding} with task.crop_padding_mode=reflect: "
                f"set it below task.image_size={self.image_size}; an image is mirrored once"
            )
        if self.model in CONDITIONAL and ({*self.mean}, {*self.std}) != ({0.0}, {1.0}):
            raise ConfigError(
                f"task.model={self.model} needs pixels in [0, 1], but task.mean={list(self.mean)}, "
                f"task.std={list(self.std)}: set every mean to 0.0 and every std to 1.0"
            )

    def require_shared_meaning(self) -> None:
        """Require the values that sites with their own data must agree on."""
        _require_classes(self)


class TextConfig(TextTask):
    """A task on texts of words from a vocabulary."""

    transform: ClassVar[NoTransform] = NoTransform()  # copies tokens to the device

    @property
    def input_shape(self) -> tuple[int]:
        """(T,)."""
        return (self.length,)

    @property
    def model_arguments(self) -> dict[str, Any]:
        """Arguments of ``build_model`` for texts only."""
        return {"vocabulary_size": self.vocabulary_size}

    def check(self) -> None:
        """Accept all values."""

    def require_shared_meaning(self) -> None:
        """Require the values that sites with their own data must agree on."""
        _require_classes(self)
        if self.vocabulary_file is None:
            raise ConfigError(
                "with partition=site the sites must agree on the vocabulary: set "
                "task.vocabulary_file to the same file everywhere (one word per line, by rank; a "
                "run on one machine writes vocabulary.txt beside the tokens in the cache folder)"
            )


class OwnConfig(OwnTask):
    """A task on data that a user's own function returns."""

    transform: ClassVar[NoTransform] = NoTransform()

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

    def check(self) -> None:
        """Refuse values that do not fit each other."""
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
    kind = INPUTS[require_choice("task.inputs", str(task.get("inputs", "images")), INPUTS)]
    config = checked_section(kind, "task", task)
    _check_classes(config)
    _check_weights(config)
    config.check()
    return config


def head_of(config: AnyConfig) -> Head:
    """Return how the model's classifier is made."""
    return Head(config.classifier, config.head_bias, config.head_init)


def _classifies(config: AnyConfig) -> bool:
    """Return whether the model distinguishes classes."""
    return not isinstance(config, OwnConfig) or config.kind == "classification"


def _check_classes(config: AnyConfig) -> None:
    names = config.class_names
    if config.classes is not None and config.num_classes not in (None, len(config.classes)):
        raise ConfigError(
            f"task.classes names {len(config.classes)} classes, but "
            f"task.num_classes={config.num_classes}: change one of them"
        )
    if twice := sorted(name for name, times in Counter(names).items() if times > 1):
        raise ConfigError(f"task.classes names {', '.join(twice)} more than once")
    if names is not None and _classifies(config) and len(names) < 2:
        raise ConfigError(
            f"task.classes=[{','.join(names)}] must name at least two classes: with fewer a model "
            "has nothing to learn"
        )


def _check_weights(config: AnyConfig) -> None:
    weights, names = config.class_weights, config.class_names
    if weights is None:
        return
    if not _classifies(config) or (config.loss is not None and config.loss not in WEIGHTED):
        raise ConfigError(
            f"task.class_weights={weights}: weights are for task.loss=cross_entropy and focal of a "
            "classification: set task.class_weights=null"
        )
    if weights != BALANCED and names is not None and len(weights) != len(names):
        raise ConfigError(
            f"task.class_weights has {len(weights)} weights, and there are {len(names)} classes: "
            "give one for each, in their order"
        )


def _require_classes(config: AnyConfig) -> None:
    if config.class_names is None:
        raise ConfigError(
            "with partition=site the sites must agree on the classes: list them in task.classes"
        )
