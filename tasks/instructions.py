"""Texts for a causal language model: a prompt, and a response to learn, as tokens and next tokens.

The form is FlowerTune's: rows with an instruction and a response. The label of a token is the next
one; those of the prompt and of padding do not count, so the loss is the mean over the response's
tokens (and the one that ends it), and ``perplexity`` is its exponential.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedhet.common.errors import ConfigError, require_types, require_whole
from fedhet.tasks.examples import IGNORED
from fedhet.tasks.hugging_face import load_tokenizer, read_splits

_KEY = "task.data_options"
Rows = tuple[NDArray[Any], ...]


def load(
    *,
    path: str | None = None,
    subset: str | None = None,
    prompt: str = "### Instruction:\n{instruction}\n### Response: ",
    target: str = "response",
    client_column: str | None = None,
    train_split: str = "train",
    test_split: str | None = None,
    test_fraction: float = 0.2,
    tokenizer: str | None = None,
    length: int = 128,
    data_folder: Path | None = None,
) -> tuple[Any, Any]:
    """Return training and test examples: tokens (n, T), next tokens (n, T), and clients if known.

    Args:
        path: a file of rows (JSON lines, CSV, ...), a folder, or a name on the hub; see
            :func:`~fedhet.tasks.hugging_face.load`, also for the splits.
        subset: of a data set that has several.
        prompt: what comes before the response, with columns in braces; empty for plain texts.
        target: column of the responses.
        client_column: column that says whose a row is.
        train_split: name of the training split.
        test_split: name of the test split; None: ``test_fraction`` of the training split.
        test_fraction: always the same examples.
        tokenizer: folder or name of a Hugging Face tokenizer.
        length: T; longer texts are cut, shorter ones padded, both at the end.
        data_folder: a site's folder (``partition=site``), in place of ``path``.

    Raises:
        ConfigError: for a missing data set, split, column or tokenizer.
    """
    require_types(_KEY, {"prompt": prompt}, {"prompt": str})
    require_whole(f"{_KEY}.length", length, low=1)
    if tokenizer is None:
        raise ConfigError(f"{_KEY}.tokenizer=null: name the model's tokenizer, or its folder")
    reader = Instructions(prompt, target, client_column, tokenizer, length)
    return read_splits(reader, path, subset, train_split, test_split, test_fraction, data_folder)


@dataclass(frozen=True)
class Instructions:
    """How rows become tokens; see :func:`load`."""

    prompt: str
    target: str
    client_column: str | None
    tokenizer: str
    length: int

    def none(self) -> Rows:
        """Return no examples."""
        return np.zeros((0, self.length), np.int32), np.zeros((0, self.length), np.int64)

    def examples(self, table: Any, place: str) -> Rows:
        """Return tokens, next tokens, and clients if a column says whose the rows are."""
        tokenizer, rows = load_tokenizer(self.tokenizer, pads=False), list(table)
        tokens, labels = self.none()
        tokens = np.full((len(rows), self.length), tokenizer.pad_token_id or 0, np.int32)
        labels = np.full((len(rows), self.length), IGNORED, np.int64)
        for number, row in enumerate(rows):
            before = self._prompt(row, place)
            response = self._column(row, self.target, place)
            asked = list(tokenizer(before)["input_ids"])
            answered = list(tokenizer(str(response), add_special_tokens=False)["input_ids"])
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            text = [*asked, *answered, *end][: self.length + 1]
            learnt = slice(max(len(asked) - 1, 0), max(len(text) - 1, 0))
            tokens[number, : learnt.stop] = text[:-1]
            labels[number, learnt] = text[learnt.start + 1 :]
        if self.client_column is None:
            return tokens, labels
        clients = [str(self._column(row, self.client_column, place)) for row in rows]
        return tokens, labels, np.asarray(clients)

    def _prompt(self, row: Mapping[str, Any], place: str) -> str:
        try:
            return self.prompt.format_map(row)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"{_KEY}.prompt={self.prompt!r} names {error}: its braces must have columns of "
                f"{place}, which are {', '.join(row)}"
            ) from None

    def _column(self, row: Mapping[str, Any], name: str, place: str) -> Any:
        if row.get(name) is None:
            raise ConfigError(f"{place} has a row without {name}; its columns: {', '.join(row)}")
        return row[name]
