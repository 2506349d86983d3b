"""fedhet-export: the model of a finished run as one file that needs torch alone.

    fedhet-export RUN --out model.pt2 [--state FILE]

The file holds the network, its parameters and the normalisation of its inputs:

    program = torch.export.load("model.pt2", extra_files=(about := {"about.json": ""}))
    probabilities = program.module()(images)        # (B, C), of uint8 (B, channels, H, W)

about.json says what goes in (shape and type), what the classes are called, for texts the words of
the vocabulary by rank (see tasks/vocabulary.py for their tokens), and of which run it is. Where
clients keep tensors of their own, such as FedPer's heads, --state names the file of one of them
(client-*/round-*.safetensors), and the model is that client's.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from common.errors import ConfigError
from common.files import replace_file
from conf import method_name
from fedhet.commands import parser_of, say_error
from fedhet.load_run import classes_in, classifier_of, meaning_of, recipe_of, task_of
from tasks import Task
from tasks.inference_model import InferenceModel
from tasks.vocabulary import SPECIAL_TOKENS

ABOUT = "about.json"
OF_THE_RUN = ("accuracy", "parameters_sha256", "seed")  # of summary.json


def export(folder: Path, path: Path, state: Path | None = None) -> dict[str, Any]:
    """Write a run's model as a program of ``torch.export``, and check that it does the same.

    Args:
        folder: the run's results directory.
        path: of the file.
        state: a file of a client's state, where clients keep tensors of their own.

    Returns:
        what its about.json says.

    Raises:
        ConfigError: where the model cannot be had, or its program does not do the same.
        OSError: where the file cannot be written.
    """
    recipe = recipe_of(folder)
    task = task_of(recipe, classes_in(meaning_of(folder)))
    classifier = classifier_of(folder, task, state).cpu()
    module = InferenceModel(classifier, task.config.transform).eval()
    examples = _examples(task, 2)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of its own about recurrent layers, and about nothing
        program = torch.export.export(
            module, (examples,), dynamic_shapes=({0: torch.export.Dim("batch")},)
        )
    about = {
        "classes": list(task.class_names),
        "input": {"shape": ["batch", *task.input_shape], "dtype": str(examples.dtype)},
        "run": {"method": method_name(recipe), **_of_the_run(folder)},
    }
    if task.vocabulary is not None:
        about["vocabulary"] = list(task.vocabulary)
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={ABOUT: json.dumps(about)})
    _require_the_same(module, content, _examples(task, 3))
    replace_file(path, lambda beside: beside.write_bytes(content.getvalue()))
    path.chmod(0o644)  # to be handed on
    return about


def main(words: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        words: the command line; None: the process's.
    """
    options = _parser().parse_args(words)
    try:
        about = export(options.run, options.out, options.state)
    except (ConfigError, OSError) as error:
        say_error("fedhet-export", error)
        raise SystemExit(2) from None
    Console().print(
        f"takes    {about['input']['dtype']} {about['input']['shape']}\n"
        f"gives    probabilities of {len(about['classes'])} classes\n"
        f"model    {options.out} ({options.out.stat().st_size / 1e6:.2f} MB)",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _examples(task: Task, count: int) -> Tensor:
    """Return raw examples of nothing in particular."""
    shape = (count, *task.input_shape)
    generator = torch.Generator().manual_seed(count)
    if task.vocabulary is None:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return torch.randint(SPECIAL_TOKENS + len(task.vocabulary), shape, generator=generator)


def _of_the_run(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return {key: summary[key] for key in OF_THE_RUN if key in summary}


def _require_the_same(module: InferenceModel, content: io.BytesIO, examples: Tensor) -> None:
    """Compare what the file does with what the model does, on a batch of another size."""
    content.seek(0)
    program = torch.export.load(content).module()
    try:
        with torch.no_grad():
            torch.testing.assert_close(program(examples), module(examples))
    except AssertionError as error:
        raise ConfigError(
            f"what torch.export {torch.__version__} has made of the model gives other "
            f"probabilities, so no file was written: {error}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, default=Path("model.pt2"), metavar="FILE")
    parser.add_argument("--state", type=Path, metavar="FILE", help="of a client: its model")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
