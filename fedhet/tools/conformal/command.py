"""fedhet-conformal: prediction sets for the models of finished runs (FedPVR, Figure 3).

    fedhet-conformal SWEEP [SWEEP ...]

SWEEP is the folder of a sweep or of a run. Nothing is trained. Each model's outputs for the test
set are computed once; then a random half of the set calibrates and the other is counted on,
several times. Written are, into SWEEP/conformal unless --out names another folder: conformal.json,
conformal.md and the picture conformal_coverage as PNG and SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from common.errors import ConfigError
from fedhet.commands import at_least, parser_of, say_error, table_console
from fedhet.report.blocks import Table
from fedhet.report.command import rich_table
from fedhet.report.layout import automatic_layout
from fedhet.report.markdown import to_markdown
from fedhet.report.sources import completed_runs
from fedhet.tools.conformal.measure import Options, RunSets, measure
from fedhet.tools.conformal.page import page

NAME = "conformal"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        words: the command line; None: the process's.
    """
    options = _parser().parse_args(words)
    console, errors = table_console(), Console(stderr=True)
    try:
        runs = completed_runs(options.sources)
        chosen = Options(
            alpha=options.alpha,
            splits=options.splits,
            seed=options.seed,
            temperature_share=options.temperature_share,
            federated=options.federated,
            bins=options.bins,
        )
        found = {}
        for run, folder in runs:
            errors.print(f"{run.name} ...", markup=False, highlight=False)
            found[id(run)] = measure(folder, chosen)
    except ConfigError as error:
        say_error("fedhet-conformal", error)
        raise SystemExit(2) from None
    layout = automatic_layout([run for run, _ in runs])
    target = options.out or options.sources[0] / NAME
    target.mkdir(parents=True, exist_ok=True)
    blocks = page(layout, found, chosen, options.reference, target / NAME)
    (target / f"{NAME}.md").write_text(to_markdown(blocks), encoding="utf-8")
    content = {
        "options": asdict(chosen) | {"reference": options.reference},
        "runs": [_content(run, found[id(run)]) for run, _ in runs],
    }
    (target / f"{NAME}.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    for block in blocks:
        if isinstance(block, Table):
            console.print(rich_table(block))
    console.print(f"results  {target}", soft_wrap=True, highlight=False)


def _content(run: Any, sets: RunSets) -> dict[str, Any]:
    return {"name": run.name, "method": run.method, "seed": run.seed, **asdict(sets)}


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-conformal", __doc__)
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="SWEEP", help="folder of a sweep or run")
    add("--alpha", type=_inside, default=0.1, help="1 - alpha is to be covered, in (0, 1) (0.1)")
    add("--splits", type=at_least(1), default=20, help="how many random splits (20)")
    add("--seed", type=int, default=0, help="of the splits (0)")
    add(
        "--temperature-share",
        type=_share,
        default=0.2,
        metavar="SHARE",
        help="of the calibration examples, those for the temperature; 0: it stays 1 (0.2)",
    )
    add(
        "--reference",
        type=_inside,
        metavar="ACCURACY",
        help="a centralised model's top-1 in (0, 1): at which mean size is as much covered?",
    )
    add(
        "--federated",
        action="store_true",
        help="clients calibrate, too, on what they hold out (partition.holdout), and send "
        "histograms of their scores",
    )
    add("--bins", type=at_least(1), default=1000, help="of these histograms (1000)")
    add("--out", type=Path, metavar="DIR", help="where to write")
    return parser


def _inside(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} must lie in (0, 1)")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} must lie in [0, 1)")
    return value


if __name__ == "__main__":
    main(sys.argv[1:])
