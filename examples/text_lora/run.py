"""Trains LoRA adapters of a small transformer on texts that it generates: python run.py"""

import subprocess
import sys
from pathlib import Path

import numpy as np
from datasets import Dataset, DatasetDict, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

THINGS = "film plot cast score camera ending story music".split()
GOOD = "fine superb moving clever lovely".split()
BAD = "dull awful clumsy tired boring".split()
FILLERS = "the a and was with very its of but".split()
WORDS = [
    "task=hf_text",
    "task.path=data/reviews",
    "task.data_options.tokenizer=data/tokenizer",
    "task.data_options.length=16",
    "task.classes=[bad,good]",
    "task.model_options.config={model_type:distilbert,n_layers:6,dim:64,n_heads:4,hidden_dim:128}",
    "task.lora={r:4,alpha:8,target_modules:[q_lin,v_lin],modules_to_save:[network.pre_classifier]}",
    "partition=dirichlet",
    "partition.alpha=1.0",
    "clients=4",
    "rounds=10",
    "local=adam",
    "local.lr=0.003",
    "local.epochs=2",
    "local.batch_size=32",
    "runtime=local",
]


def write_texts(folder, train=800, test=200):
    """Write reviews with two words of praise or of blame, in Hugging Face's format."""
    rng = np.random.default_rng(0)
    splits = {name: _reviews(rng, count) for name, count in (("train", train), ("test", test))}
    disable_progress_bars()
    DatasetDict(splits).save_to_disk(folder)


def _reviews(rng, count):
    labels = rng.integers(0, 2, count)
    texts = []
    for label in labels:
        words = [*rng.choice(FILLERS, 7), *rng.choice(THINGS, 3)]
        words += [*rng.choice(GOOD if label else BAD, 2)]
        texts.append(" ".join(rng.permutation(words)))
    return Dataset.from_dict({"text": texts, "label": ["good" if one else "bad" for one in labels]})


def write_tokenizer(folder):
    """Write a tokenizer of whole words that begins every text with [CLS]."""
    words = ["[PAD]", "[UNK]", "[CLS]", *THINGS, *GOOD, *BAD, *FILLERS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", vocabulary["[CLS]"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)


if __name__ == "__main__":
    write_texts(Path("data/reviews"))
    write_tokenizer(Path("data/tokenizer"))
    command = [sys.executable, "-m", "fedhet", *WORDS, *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)
