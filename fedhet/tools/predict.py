"""fedhet-predict: predicts every row of a table with a model that fedhet-export has written.

    fedhet-predict MODEL.pt2 new.csv --out predictions.csv

The model comes from a run on a table (task=tabular). The new table, CSV or Parquet, is written like
the run's and has its columns, in any order; it may have others and needs no target. The output has
the same rows with further columns: `predicted`; for classes also `p_CLASS`, each one's probability;
and `set_0.9`, if the run has calibrated prediction sets (calibration.alphas=[0.1]): the likeliest
classes that hold the right one in at least 90 % of all cases, such as `yes or no`.

PyTorch reads the model with pickle, which can run code: take it only from somebody you trust.
"""

from __future__ import annotations

import argparse
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.console import Console

from fedhet.commands import parser_of, reported_errors
from fedhet.common.errors import ConfigError
from fedhet.common.files import replace_file, writable_file
from fedhet.common.text_files import Dialect, require_file
from fedhet.tasks.conformal.scores import Array, probabilities_of, whole_sets
from fedhet.tasks.table_columns import described_inputs
from fedhet.tasks.tables import read_table
from fedhet.tools.export import ABOUT

if TYPE_CHECKING:
    from pandas import DataFrame


def predictions(model: Path, table: Path) -> DataFrame:
    """Return a table's rows with the predictions of an exported model."""
    program, about = _load(model)
    rows = read_table(table, Dialect(**about["input"]["csv"]), "TABLE")
    inputs = described_inputs(rows, about["input"]["columns"])
    with torch.no_grad():
        outputs: Array = program(torch.from_numpy(inputs)).double().numpy()
    found: dict[str, Any] = {"predicted": outputs[:, 0]}
    if classes := about["classes"]:
        found = {"predicted": [classes[n] for n in outputs.argmax(axis=1)]}
        found |= {f"p_{name}": outputs[:, n].round(4) for n, name in enumerate(classes)}
        found |= _sets(outputs, classes, about.get("prediction_sets", {}))
    if twice := [name for name in found if name in rows.columns]:
        raise ConfigError(f"{table} has the column {', '.join(twice)} already: rename it there")
    found_rows = rows.assign(**found)
    found_rows.attrs.clear()  # a Parquet file would have the table's path
    return found_rows


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; ``words`` replace the process's command line."""
    options = _parser().parse_args(words)
    with reported_errors("fedhet-predict"):
        writable_file(options.out, "--out ")
        found = predictions(options.model, options.table)
        parquet = options.out.suffix == ".parquet"
        write = found.to_parquet if parquet else partial(found.to_csv, index=False)
        replace_file(options.out, write)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    for name in (column for column in found if column.startswith("set_")):
        alone = int(found[name].isin(found["predicted"]).sum())
        console.print(f"{name}: {alone} of {len(found)} rows have one class")
    console.print(f"predictions  {options.out}")


def _load(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return an exported program and its about.json."""
    require_file(path, "MODEL")
    file, other = {ABOUT: ""}, f"{path} is not a model that fedhet-export has written"
    if not zipfile.is_zipfile(path):
        raise ConfigError(other)
    try:
        program = torch.export.load(path, extra_files=file).module()
        about: dict[str, Any] = json.loads(file[ABOUT])
    except Exception as error:  # of any kind: it may be any archive
        raise ConfigError(f"{other}, or is damaged ({type(error).__name__})") from None
    if "columns" not in about["input"]:
        raise ConfigError(f"{path} is not the model of a table (task=tabular)")
    return program, about


def _sets(
    outputs: Array, classes: Sequence[str], calibrated: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return each row's prediction set at each level, the likeliest class first."""
    found = {}
    for one in calibrated.get("sets", ()):
        if one["score"] != "APS":
            continue
        with np.errstate(divide="ignore"):
            probabilities = probabilities_of(np.log(outputs), calibrated["temperature"])
        threshold = math.inf if one["threshold"] is None else one["threshold"]
        sizes = whole_sets(probabilities, threshold).sum(axis=1)
        order = np.argsort(-probabilities, axis=1, kind="stable")
        found[f"set_{1 - one['alpha']:g}"] = [
            " or ".join(classes[n] for n in row[:size])
            for row, size in zip(order, sizes, strict=True)
        ]
    return found


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-predict", __doc__)
    parser.add_argument("model", type=Path, metavar="MODEL", help="a file of fedhet-export")
    parser.add_argument("table", type=Path, metavar="TABLE", help="a CSV or Parquet file")
    out = "a CSV or Parquet file (predictions.csv)"
    parser.add_argument("--out", type=Path, default="predictions.csv", metavar="FILE", help=out)
    return parser


if __name__ == "__main__":
    main()
