"""Texts for a causal language model: a prompt, and a response to learn, as tokens and next tokens.

The form is FlowerTune's: rows with an instruction and a response. The label of a token is the next
one; those of the prompt and of padding do not count, so the loss is the mean over the response's
tokens (and the one that ends it), and ``perplexity`` is its exponential.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np

from fedhet.common.configured import Key, signature_of
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Text
from fedhet.tasks.examples import IGNORED
from fedhet.tasks.hugging_face import Arrays, Splits, load_tokenizer, with_clients

_KEY = "task.data_options"


class Instructions(Splits):
    """A data set of texts, and how its rows become tokens."""

    target: Annotated[Text, Key("task.target")] = "response"
    """column of the responses"""
    test_split: Text | None = None
    """name of the test split; None: ``test_fraction`` of the training split"""
    prompt: str = "### Instruction:\n{instruction}\n### Response: "
    """what comes before the response, with columns in braces; empty for plain texts"""
    tokenizer: Text | None = None
    """folder or name of a Hugging Face tokenizer"""
    length: Count = 128
    """T; longer texts are cut, shorter ones padded, both at the end"""

    def check_together(self) -> None:
        """Require a tokenizer."""
        if self.tokenizer is None:
            raise ConfigError(f"{_KEY}.tokenizer=null: name the model's tokenizer, or its folder")

    def none(self) -> Arrays:
        """Return no examples."""
        return np.zeros((0, self.length), np.int32), np.zeros((0, self.length), np.int64)

    def examples(self, table: Any, place: str) -> Arrays:
        """Return tokens, next tokens, and clients if a column says whose the rows are."""
        tokenizer, rows = load_tokenizer(str(self.tokenizer), pads=False), list(table)
        tokens = np.full((len(rows), self.length), tokenizer.pad_token_id or 0, np.int32)
        labels = np.full((len(rows), self.length), IGNORED, np.int64)
        for number, row in enumerate(rows):
            before = self._prompt(row, place)
            if (response := row.get(self.target)) is None:
                has = ", ".join(row)
                raise ConfigError(f"{place} has a row without {self.target}; its columns: {has}")
            asked = list(tokenizer(before)["input_ids"])
            answered = list(tokenizer(str(response), add_special_tokens=False)["input_ids"])
            end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            text = [*asked, *answered, *end][: self.length + 1]
            learnt = slice(max(len(asked) - 1, 0), max(len(text) - 1, 0))
            tokens[number, : learnt.stop] = text[:-1]
            labels[number, learnt] = text[learnt.start + 1 :]
        return with_clients((tokens, labels), self.clients(table, place))

    def _prompt(self, row: Mapping[str, Any], place: str) -> str:
        try:
            return self.prompt.format_map({k: "" if v is None else v for k, v in row.items()})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{_KEY}.prompt={self.prompt!r} names {error}: its braces must have columns of "
                f"{place}, which are {', '.join(row)}"
            ) from None


def load(**given: Any) -> tuple[Any, Any]:
    """Return training and test examples: tokens (n, T), next tokens (n, T), and clients if known.

    The arguments are those of :class:`Instructions`.

    Raises:
        ConfigError: for a missing data set, split, column or tokenizer.
    """
    return Instructions(**given).splits()


load.__signature__ = signature_of(Instructions)  # type: ignore[attr-defined]
