"""The words that a model on texts knows: of one vocabulary every site has the same tokens."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from common.errors import ConfigError
from tasks.tokens import SPECIAL_TOKENS, START, UNKNOWN

SPLITTING = 1  # how texts become words: raise it when that changes
# Letters and digits; an apostrophe between them belongs to the word, other punctuation ends it.
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def split_words(text: str) -> list[str]:
    """Return a text's words, in lower case, without punctuation and line breaks of HTML.

    Raises:
        ConfigError: where it is no text.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is no text: change task.text_column or the data")
    return _WORD.findall(text.lower().replace("<br />", " "))


@dataclass(frozen=True)
class Vocabulary:
    """Words by rank.

    Attributes:
        words: the most frequent first.
    """

    words: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens there are: the words and the special ones."""
        return len(self.words) + SPECIAL_TOKENS

    @cached_property
    def digest(self) -> str:
        """What tokens depend on, as a hash."""
        text = "\n".join((str(SPLITTING), *self.words))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, SPECIAL_TOKENS)}

    def tokens(self, text: str, most: int) -> list[int]:
        """Return the start and a token a word, ``most`` at most."""
        words = islice(split_words(text), most - 1)
        return [START, *(self._numbers.get(word, UNKNOWN) for word in words)]


def count_words(texts: Iterable[str], size: int) -> Vocabulary:
    """Return the most frequent words of texts; of equally frequent ones the alphabet's first.

    Args:
        texts: of the training split.
        size: the number of tokens, the special ones included.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return Vocabulary(tuple(ranked[: size - SPECIAL_TOKENS]))


def write_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Write one word a line, by rank."""
    path.write_text("".join(f"{word}\n" for word in vocabulary.words), encoding="utf-8")


def read_vocabulary(path: Path, size: int) -> Vocabulary:
    """Return the vocabulary in a file.

    Args:
        path: a text file in UTF-8, one word a line, by rank.
        size: the most tokens, the special ones included.

    Raises:
        ConfigError: where the file is not there, too long, or no such list.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file: change task.vocabulary_file")
    try:
        words = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} (task.vocabulary_file) is not UTF-8: {error}") from error
    if words[-1] == "":
        words.pop()
    if len(words) > size - SPECIAL_TOKENS:
        raise ConfigError(
            f"{path} has {len(words)} words and task.vocabulary_size={size} allows "
            f"{size - SPECIAL_TOKENS}, beside {SPECIAL_TOKENS} special tokens: change "
            "task.vocabulary_size or task.vocabulary_file"
        )
    seen: set[str] = set()
    for line, word in enumerate(words, 1):
        if word in seen or split_words(word) != [word]:
            raise ConfigError(
                f"{path} (task.vocabulary_file), line {line}: {word!r} is "
                f"{'there twice' if word in seen else 'no word in lower case'}; a line has one "
                "word, without punctuation, and lines go by rank"
            )
        seen.add(word)
    return Vocabulary(tuple(words))
