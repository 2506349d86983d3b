"""Prints the parameters' hash of every recipe of the matrix: ``python -m tests.bits > before``.

A change that should move no number gives the same lines before and after.
"""

import contextlib
import io
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from fedhet.common.flower.task_identity import set_identity
from tests.recipes import run_recipe
from tests.test_every_strategy import RECIPES, WHOLE


def bits(words: list[str]) -> str:
    """Return a recipe's words and the hash of the parameters that three rounds end with."""
    set_identity()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        found = run_recipe(Path(folder) / "run", *WHOLE, *words)
    return f"{' '.join(words)}\t{found['parameters_sha256']}"


if __name__ == "__main__":
    chosen = [words for words, _ in RECIPES if all(one in " ".join(words) for one in sys.argv[1:])]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for line in pool.map(bits, chosen):
            print(line, flush=True)
