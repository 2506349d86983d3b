"""fedhet-export: exports the model of a finished run to one file that needs only torch.

    fedhet-export RUN --out model.pt2 [--best] [--state FILE] [--task KEY=VALUE ...]

The file holds the network, its parameters and the normalisation of images:

    program = torch.export.load("model.pt2", extra_files=(about := {"about.json": ""}))
    probabilities = program.module()(images)        # (B, C), of uint8 (B, channels, H, W)

A segmentation gives (B, C, H, W), a regression its values. about.json has the shape and type of the
inputs, the kind of the outputs, the names of the classes, for texts the words of the vocabulary by
rank, and the run. A table's columns are scaled outside the program: fedhet-predict does it, or you,
by about.json, which has each input's column with its mean and scale, or its category. The file has
the last model, or with --best the best round's (checkpoint.best=true). If clients keep their own
tensors or models, such as FedPer's heads and Ditto's models, --state exports one client's model
from its file (client-*/round-*.safetensors). The inputs have the shape of an example. If your data
function gives no example on this machine, --task names a function that does, such as --task
test_data=my_project.data:some.
"""

from __future__ import annotations

import argparse
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from torch import Tensor

from fedhet.changed_task import changed_task, task_of_model
from fedhet.commands import add_trust, parser_of, reported_errors
from fedhet.common.checksums import file_sha256
from fedhet.common.errors import ConfigError
from fedhet.common.files import replace_file, writable_file
from fedhet.common.outside import said_by
from fedhet.common.results import read_summary
from fedhet.conf import method_name
from fedhet.conf.trust import trust
from fedhet.load_run import label_metadata_of, model_of, recipe_of
from fedhet.tasks import AnyTask, OwnTask, TableTask, tabular
from fedhet.tasks.column_statistics import ColumnStatistics
from fedhet.tasks.inference_model import InferenceModel
from fedhet.tasks.losses import LOSSES
from fedhet.tasks.table_columns import Columns
from fedhet.tasks.table_task import PUBLIC_COLUMNS
from fedhet.tasks.vocabulary import SPECIAL_TOKENS

ABOUT = "about.json"
OF_THE_RUN = ("accuracy", "parameters_sha256", "seed")  # of summary.json
OF_THE_BEST = ("round", "metric", "value", "parameters_sha256")  # of its best_model
SCORES = ("accuracy", "metric", "value")  # of these: they may be of other models


def export(
    folder: Path,
    path: Path,
    state: Path | None = None,
    words: Sequence[str] = (),
    *,
    best: bool = False,
) -> dict[str, Any]:
    """Export a run's model to ``path``, check its outputs, and return its about.json.

    Args:
        folder: a results directory.
        path: of the file.
        state: a client's state file: its own model.
        words: changes of the run's task that give an example of the model's input, such as
            ``test_data=my_project.data:some``; the model and about.json are the run's.
        best: the model of the best round in place of the last one.
    """
    writable_file(path, "--out ")
    recipe, summary = recipe_of(folder), read_summary(folder)
    stored = label_metadata_of(folder, best=best)
    task = task_of_model(recipe, stored)
    model = model_of(folder, task, state, best=best).cpu()
    of_classes = not task.any_label
    module = InferenceModel(model, task.config.transform, probabilities=of_classes).eval()
    if words and not isinstance(task, OwnTask):
        raise ConfigError(f"--task {words[0]}: task={task.name} needs no example of its inputs")
    shown = changed_task(folder, words, best=best) if words else task
    examples = _examples(shown, 2)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about recurrent layers
        outputs: Tensor = module(examples)
        try:
            program = torch.export.export(
                module, (examples,), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
        except Exception as error:  # of any kind: it follows the code of task.model
            raise ConfigError(f"torch.export cannot follow the model: {said_by(error)}") from error
    about: dict[str, Any] = {
        "classes": list(task.class_names),
        "input": {"shape": ["batch", *examples.shape[1:]], "dtype": str(examples.dtype)},
        "output": {"shape": ["batch", *outputs.shape[1:]], "values": _values(task)},
        "run": {"method": method_name(recipe), **_figures(summary, recipe, state, best=best)},
    }
    if task.vocabulary is not None:
        about["vocabulary"] = list(task.vocabulary)
    if isinstance(task, TableTask) and (columns := _columns(task, stored)):
        given = task.config.data_options or {}
        csv = {key: given.get(key, usual) for key, usual in tabular.DIALECT.items()}
        about["input"] |= {"columns": columns, "csv": csv}
    about["input"] |= tokens_of(task)
    if state is None and not best and "sets" in (sets := summary.get("prediction_sets", {})):
        about["prediction_sets"] = sets
    content = io.BytesIO()
    torch.export.save(program, content, extra_files={ABOUT: json.dumps(about)})
    _require_same_outputs(module, content, _examples(shown, 3))
    replace_file(path, lambda beside: beside.write_bytes(content.getvalue()))
    return about


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; ``words`` replace the process's command line."""
    options = _parser().parse_args(words)
    with reported_errors("fedhet-export"):
        if options.trust:
            trust(options.run)
        about = export(options.run, options.out, options.state, options.task, best=options.best)
    Console().print(
        f"input    {about['input']['dtype']} {about['input']['shape']}\n"
        f"output   {about['output']['values']} {about['output']['shape']}\n"
        f"model    {options.out} ({options.out.stat().st_size / 1e6:.2f} MB)",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _figures(
    summary: Mapping[str, Any], recipe: DictConfig, state: Path | None, *, best: bool
) -> dict[str, Any]:
    """Return the figures of summary.json that describe the exported model."""
    if state is not None:  # another model than the run's, which a client keeps
        return {"seed": summary["seed"], "state_sha256": file_sha256(state)}
    found = {key: summary[key] for key in OF_THE_RUN if key in summary}
    if best:
        found = {"seed": summary["seed"]}
        found |= {key: summary["best_model"][key] for key in OF_THE_BEST}
    of_clients = recipe.evaluation.get("model") == "clients"  # their own models have the scores
    return {key: value for key, value in found.items() if not (of_clients and key in SCORES)}


def _values(task: AnyTask) -> str:
    """Return what the program's outputs are."""
    if not task.any_label:
        return "probabilities"
    loss = task.config.loss
    named = loss is None or loss in LOSSES["regression"]
    return "predictions" if named else f"outputs, as task.loss={loss} takes them"


def tokens_of(task: AnyTask) -> dict[str, Any]:
    """Return how texts become the inputs of a Hugging Face model; empty for other inputs."""
    options: Mapping[str, Any] = {}
    if isinstance(task, OwnTask):
        options = task.config.data_options or {}
    if options.get("tokenizer") is None:
        return {}
    return {"tokenizer": options["tokenizer"], "length": options.get("length")}


def _columns(task: TableTask, stored: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what the inputs of a table's model are; empty if its file does not have it."""
    names: Mapping[str, Any] = task.config.data_options or {}
    statistics = stored.get("columns")
    if PUBLIC_COLUMNS in stored:
        names = json.loads(stored[PUBLIC_COLUMNS])
        statistics = names["fitted"]
    if statistics is None:
        return []
    numeric, categorical = names["numeric"], names["categorical"]
    found = ColumnStatistics.from_json(statistics)
    return Columns.of_statistics(found, "", numeric, categorical).inputs()


def _examples(task: AnyTask, count: int) -> Tensor:
    """Return random raw examples; of own data, the first ones of the test set or of client 0."""
    generator = torch.Generator().manual_seed(count)
    if isinstance(task, TableTask):
        return torch.randn((count, *task.input_shape), generator=generator)
    if isinstance(task, OwnTask):
        return _own_examples(task, count)
    shape = (count, *task.input_shape)
    if task.vocabulary is None:
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return torch.randint(SPECIAL_TOKENS + len(task.vocabulary), shape, generator=generator)


def _own_examples(task: OwnTask, count: int) -> Tensor:
    """Return the first examples of the test set; without one, of client 0."""
    examples = task.test_data()
    if examples is None:
        try:
            examples, _ = task.client_data(0)
        except (ConfigError, OSError) as error:
            raise ConfigError(
                "fedhet-export needs an example of the model's input, and task.data gives none on "
                "this machine: name a function, --task test_data=package.module:function "
                f"({error})"
            ) from None
    inputs, _ = next(examples.batches(count, generator=None, train=False))
    return inputs


def _require_same_outputs(module: InferenceModel, content: io.BytesIO, examples: Tensor) -> None:
    """Compare the outputs of the file and of the model, on a batch of another size."""
    content.seek(0)
    program = torch.export.load(content).module()
    try:
        with torch.no_grad():
            torch.testing.assert_close(program(examples), module(examples))
    except AssertionError as error:
        raise ConfigError(
            f"torch.export {torch.__version__} made a program with other outputs than the model's, "
            f"so no file was written: {error}"
        ) from None


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, default=Path("model.pt2"), metavar="FILE")
    parser.add_argument("--best", action="store_true", help="export the best round's model")
    parser.add_argument("--state", type=Path, metavar="FILE", help="export this client's own model")
    task = "for your own data: a key of the task that gives examples here; may be repeated"
    parser.add_argument("--task", action="append", default=[], metavar="KEY=VALUE", help=task)
    add_trust(parser)
    return parser


if __name__ == "__main__":
    main()
