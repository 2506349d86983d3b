"""The vocabulary of a model on texts: words and their tokens.

As in Keras' IMDB, token 0 pads, 1 starts a text, 2 is any unknown word, and the vocabulary's words
follow by rank from 3. (Keras skips 3 and begins at 4.)
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from unicodedata import category, normalize

from fedhet.common.errors import ConfigError
from fedhet.common.text_files import read_text

PADDING, START, UNKNOWN = range(3)
SPECIAL_TOKENS = 3  # and the token of the first word
SPLITTING = 2  # version of :func:`split_words`: raise it when that changes
_BREAK = re.compile("<br ?/?>")


def split_words(text: str) -> list[str]:
    """Return the lower-case words of a text without punctuation and HTML line breaks.

    An accent may be a character of its own or not: the letter is the same (Unicode's NFC).
    """
    if not isinstance(text, str):
        raise ConfigError(f"{text!r} is not text: change task.text_column or the data")
    return _word().findall(_BREAK.sub(" ", normalize("NFC", text).lower()))


@cache
def _word() -> re.Pattern[str]:
    """Return the pattern of a word: letters, with their marks, and digits; apostrophes in between.

    Marks are the accents and vowel signs that are characters of their own.
    """
    marks = "".join(c for c in map(chr, range(0x300, 0x10000)) if category(c).startswith("M"))
    letters = f"(?:[^\\W_][{marks}]*)+"
    return re.compile(f"{letters}(?:'{letters})*")


@dataclass(frozen=True)
class Vocabulary:
    """Words by rank, the most frequent first."""

    words: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """The number of tokens: words and special tokens."""
        return len(self.words) + SPECIAL_TOKENS

    @cached_property
    def digest(self) -> str:
        """A hash of all that the tokens depend on."""
        text = "\n".join((str(SPLITTING), *self.words))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, SPECIAL_TOKENS)}

    def tokens(self, text: str, most: int) -> list[int]:
        """Return the start token and one token per word, at most ``most``."""
        words = islice(split_words(text), most - 1)
        return [START, *(self._numbers.get(word, UNKNOWN) for word in words)]


def count_words(texts: Iterable[str], size: int) -> Vocabulary:
    """Return the most frequent words of texts; ties go by the alphabet.

    ``size`` is the number of tokens, special tokens included.
    """
    counts = Counter(word for text in texts for word in split_words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return Vocabulary(tuple(ranked[: size - SPECIAL_TOKENS]))


def write_vocabulary(vocabulary: Vocabulary, path: Path) -> None:
    """Write one word per line, by rank."""
    path.write_text("".join(f"{word}\n" for word in vocabulary.words), encoding="utf-8")


def read_vocabulary(path: Path, size: int) -> Vocabulary:
    """Return the vocabulary in a file of at most ``size`` tokens, special tokens included.

    The file is UTF-8 with one word per line, by rank.

    Raises:
        ConfigError: if the file is missing, too long or malformed.
    """
    words = read_text(path, "task.vocabulary_file").split("\n")
    if words[-1] == "":
        words.pop()
    if len(words) > size - SPECIAL_TOKENS:
        raise ConfigError(
            f"{path} has {len(words)} words, but task.vocabulary_size={size} allows "
            f"{size - SPECIAL_TOKENS}, beside {SPECIAL_TOKENS} special tokens: change "
            "task.vocabulary_size or task.vocabulary_file"
        )
    seen: set[str] = set()
    for line, word in enumerate(words, 1):
        if word in seen or split_words(word) != [word]:
            raise ConfigError(
                f"{path} (task.vocabulary_file), line {line}: {word!r} is "
                f"{'there twice' if word in seen else 'not a word in lower case'}; each line must "
                "have one word without punctuation, by rank"
            )
        seen.add(word)
    return Vocabulary(tuple(words))
