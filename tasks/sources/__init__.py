"""Sources of examples: scikit-learn, the Hugging Face hub, files, a site's folder."""

from __future__ import annotations

from tasks.config import ImageConfig, TaskConfig, TextConfig
from tasks.sources.arrays import Split
from tasks.sources.images import ImageSource
from tasks.sources.source import Source
from tasks.sources.texts import TextSource

__all__ = ["Source", "Split", "open_source"]


def open_source(task: TaskConfig) -> Source:
    """Return the source of a task's examples; reads nothing yet."""
    match task:
        case ImageConfig():
            return ImageSource(task)
        case TextConfig():
            return TextSource(task)
    raise TypeError(f"{type(task).__name__} is no kind of task")
