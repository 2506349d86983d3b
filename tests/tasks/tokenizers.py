"""A tokenizer of a few words, made without a download."""

from collections.abc import Sequence
from pathlib import Path


def write_tokenizer(folder: Path, words: Sequence[str]) -> str:
    """Write a tokenizer of whole words: [PAD] is 0, [UNK] 1, then the words; return its folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    return str(folder)
