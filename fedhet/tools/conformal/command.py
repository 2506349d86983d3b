"""fedhet-conformal: prediction sets for the models of finished runs (FedPVR, Figure 3).

    fedhet-conformal SWEEP [SWEEP ...]

SWEEP is the folder of a sweep or of a run. Nothing is trained. In each of several random splits one
half of the test set calibrates and the other half is counted. SWEEP/conformal, or the folder that
--out names, gets conformal.json, conformal.md and the plot conformal_coverage as PNG and SVG.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path

from rich.console import Console

from fedhet.commands import (
    add_trust,
    at_least,
    number_between,
    parser_of,
    reported_errors,
    say_error,
    table_console,
)
from fedhet.common.errors import ConfigError
from fedhet.common.files import save_text, writable_folder
from fedhet.conf.trust import trust
from fedhet.report.blocks import Table
from fedhet.report.command import rich_table
from fedhet.report.layout import automatic_layout
from fedhet.report.render import to_markdown
from fedhet.report.sources import completed_runs
from fedhet.tools.conformal.measure import Options, measure
from fedhet.tools.conformal.page import page

NAME = "conformal"
_TEMPERATURE = "of the calibration examples, those for the temperature; 0: it stays 1 (0.2)"
_REFERENCE = "a centralised model's top-1 in (0, 1); the table has the mean size that covers it"
_FEDERATED = "also calibrate at the clients, on their held-out examples (partition.holdout)"


def main(words: Sequence[str] | None = None) -> None:
    """Run the command; ``words`` replace the process's command line."""
    options = _parser().parse_args(words)
    with reported_errors("fedhet-conformal"):
        _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    chosen = Options(**{one.name: getattr(options, one.name) for one in fields(Options)})
    console, errors = table_console(), Console(stderr=True)
    runs, left_out = completed_runs(options.sources)
    for reason in left_out:
        say_error("fedhet-conformal", reason)
    target = writable_folder(options.out or options.sources[0] / NAME, "--out ")
    found = {}
    for run, folder in runs:
        errors.print(f"{run.name} ...", markup=False, highlight=False)
        if run.settings.get("evaluation.model") == "clients":
            text = "the sets describe the shared model; this run scores the clients' own models"
            errors.print(f"{text} (evaluation.model=clients)", markup=False, highlight=False)
        if options.trust:
            trust(folder)
        try:
            found[id(run)] = measure(folder, chosen)
        except ConfigError as error:
            say_error("fedhet-conformal", f"{run.name}: {error}")
    measured = [(run, folder) for run, folder in runs if id(run) in found]
    failed, runs = len(runs) - len(measured), measured
    if not runs:
        raise ConfigError("none of the runs could be measured")
    layout = automatic_layout([run for run, _ in runs])
    blocks = page(layout, found, chosen, options.reference, target / NAME)
    save_text(target / f"{NAME}.md", to_markdown(blocks))
    content = {
        "options": asdict(chosen) | {"reference": options.reference},
        "runs": [
            {"name": run.name, "method": run.method, "seed": run.seed, **asdict(found[id(run)])}
            for run, _ in runs
        ],
    }
    save_text(target / f"{NAME}.json", json.dumps(content) + "\n")
    for block in blocks:
        if isinstance(block, Table):
            console.print(rich_table(block))
    console.print(f"results  {target}", soft_wrap=True, highlight=False)
    if failed:
        raise SystemExit(1)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("fedhet-conformal", __doc__)
    add = parser.add_argument
    add("sources", nargs="+", type=Path, metavar="SWEEP", help="folder of a sweep or run")
    add("--alpha", type=number_between(0, 1), default=0.1, help="cover 1 - alpha, in (0, 1) (0.1)")
    add("--splits", type=at_least(1), default=20, help="how many random splits (20)")
    add("--seed", type=int, default=0, help="of the splits (0)")
    share = number_between(0, 1, with_low=True)
    add("--temperature-share", type=share, default=0.2, metavar="SHARE", help=_TEMPERATURE)
    add("--reference", type=number_between(0, 1), metavar="ACCURACY", help=_REFERENCE)
    add("--federated", action="store_true", help=_FEDERATED)
    add("--bins", type=at_least(1), default=1000, help="of the clients' histograms (1000)")
    add("--out", type=Path, metavar="DIR", help="where to write")
    add_trust(parser)
    return parser


if __name__ == "__main__":
    main()
