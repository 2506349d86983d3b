"""Texts in tables, and their vocabulary."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fedhet.tasks.config import TextConfig
from fedhet.tasks.sources.arrays import SPLIT_SEED
from fedhet.tasks.sources.encodings import TokenEncoding
from fedhet.tasks.sources.source import Source
from fedhet.tasks.sources.store import build_once, cache_folder, cache_key
from fedhet.tasks.sources.tables import SourceColumns
from fedhet.tasks.vocabulary import (
    SPLITTING,
    Vocabulary,
    count_words,
    read_vocabulary,
    write_vocabulary,
)

FILE = "vocabulary.txt"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextSource(Source):
    """The examples of a task on texts."""

    task: TextConfig

    @cached_property
    def encoding(self) -> TokenEncoding:
        """Tokens of the task's vocabulary."""
        return TokenEncoding(self._vocabulary(), self.task.length)

    @property
    def columns(self) -> SourceColumns:
        """The tables' columns."""
        task = self.task
        return SourceColumns(task.text_column, task.label_column, task.client_column, "text_column")

    def vocabulary(self) -> Vocabulary:
        """Return the words of the tokens."""
        return self.encoding.vocabulary

    def _vocabulary(self) -> Vocabulary:
        """Return task.vocabulary_file, or the training split's most frequent words."""
        size = self.task.vocabulary_size
        if self.task.vocabulary_file is not None:
            return read_vocabulary(Path(self.task.vocabulary_file).expanduser(), size)
        table = self._table(self.task.train_split)
        identity = {**table.identity, "vocabulary_size": size, "splitting": SPLITTING}
        if self.task.test_split is None:
            identity["test"] = [self.task.test_fraction, SPLIT_SEED]
        name = f"{self.task.name}-vocabulary-{cache_key(identity)}"

        def build(unfinished: Path) -> None:
            logger.info("counting the words of %s, once", self.task.name)
            write_vocabulary(count_words(self._training_texts(), size), unfinished / FILE)

        folder = build_once(cache_folder() / TokenEncoding.kind / name, build)
        return read_vocabulary(folder / FILE, size)

    def _training_texts(self) -> list[str]:
        rows = list(self._table(self.task.train_split).rows())
        kept = np.arange(len(rows))
        if self.task.test_split is None:  # do not count words of the test examples
            strata = [row.label if row.client is None else row.client for row in rows]
            kept, _ = self._split_off(np.array(strata))
        return [rows[row].value for row in kept]
