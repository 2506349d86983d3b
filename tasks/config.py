"""conf/task/*.yaml as checked values; every key is explained in those files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tasks.errors import ConfigError, require_known_keys, require_option

SOURCES = ("embedded", "hub", "files", "image_folder")


@dataclass(frozen=True)
class TaskConfig:
    """What is learned, from which data, with which model."""

    name: str
    source: str
    model: str
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int | None = None
    classes: tuple[str, ...] | None = None
    hub: str | None = None
    image_column: str = "image"
    label_column: str = "label"
    group_column: str | None = None
    train_split: str = "train"
    test_split: str | None = "test"
    test_fraction: float = 0.2
    flip: bool = False
    crop_padding: int = 0
    crop_probability: float = 1.0
    head_bias: bool | None = None
    stem: str | None = None
    path: str | None = None
    train_size: int | None = None
    test_size: int | None = None

    @classmethod
    def from_mapping(cls, task: Mapping[str, Any]) -> TaskConfig:
        """Check a plain mapping.

        Raises:
            ConfigError: for an unknown or missing key, or a value out of range.
        """
        known = {field.name for field in fields(cls)}
        require_known_keys("task", task, known)
        required = {"name", "source", "model", "channels", "image_size", "mean", "std"}
        if missing := sorted(required - set(task)):
            raise ConfigError(f"the task lacks task.{', task.'.join(missing)}")
        values = dict(task)
        for key in ("mean", "std"):
            values[key] = tuple(float(value) for value in task[key])
        if task.get("classes") is not None:
            values["classes"] = tuple(str(name) for name in task["classes"])
        return cls(**values)

    def __post_init__(self) -> None:
        """Check the ranges."""
        require_option("task.source", self.source, SOURCES)
        if self.channels not in (1, 3):
            raise ConfigError(f"task.channels={self.channels}: 1 (grey) and 3 (RGB) are possible")
        _require("image_size", self.image_size, self.image_size >= 1, ">= 1")
        for key, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != self.channels:
                raise ConfigError(
                    f"task.{key} has {len(values)} values and task.channels={self.channels}: "
                    "give one value a channel"
                )
        _require("std", self.std, min(self.std) > 0, "> 0")
        _require("crop_padding", self.crop_padding, self.crop_padding >= 0, ">= 0")
        _require(
            "crop_probability", self.crop_probability, 0 <= self.crop_probability <= 1, "in [0, 1]"
        )
        _require("test_fraction", self.test_fraction, 0 < self.test_fraction < 1, "in (0, 1)")
        for key in ("train_size", "test_size"):
            size = getattr(self, key)
            _require(key, size, size is None or size >= 1, ">= 1, or null for all")
        if self.classes is not None and self.num_classes not in (None, len(self.classes)):
            raise ConfigError(
                f"task.classes names {len(self.classes)} classes and "
                f"task.num_classes={self.num_classes}: change one of them"
            )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The classes' names in the order of their labels; None: the data folder's own."""
        if self.classes is None and self.num_classes is not None:
            return tuple(str(label) for label in range(self.num_classes))
        return self.classes


def _require(key: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"task.{key}={value} must be {allowed}")
