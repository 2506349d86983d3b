"""Sources of examples: scikit-learn, the Hugging Face hub, files, a site's folder."""

from __future__ import annotations

from fedhet.tasks.config import ImageConfig, TextConfig
from fedhet.tasks.sources.arrays import Split
from fedhet.tasks.sources.images import ImageSource
from fedhet.tasks.sources.source import Source
from fedhet.tasks.sources.texts import TextSource

__all__ = ["Source", "Split", "open_source"]


def open_source(task: ImageConfig | TextConfig) -> Source:
    """Return the source of a task's examples; reads nothing yet."""
    return ImageSource(task) if isinstance(task, ImageConfig) else TextSource(task)
