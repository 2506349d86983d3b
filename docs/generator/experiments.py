"""docs/experiments.md: the papers' tables and figures that there is an experiment file for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from docs.generator.markdown import table
from docs.generator.recipes import ROOT
from fedhet.conf.experiments import experiment_files, read_experiment

_PAPERS = {
    "fedpvr": "FedPVR (Li et al., CVPR 2023)",
    "feddw": "FedDW (Liu et al., 2024)",
    "fedmrur": "FedMRUR (An et al., NeurIPS 2023)",
    "maecho": "MA-Echo (Su et al., Neural Networks 2023)",
    "flamby": "Heart disease at four hospitals (FLamby, Ogier du Terrail et al., NeurIPS 2022)",
    "niid_bench": "NIID-Bench (Li et al., ICDE 2022)",
    "fedbn": "FedBN on a feature shift (no paper's: [results/fedbn.md](results/fedbn.md))",
    "scale": "Time and bytes (no paper's: [results/scale.md](results/scale.md))",
}
_FRAME = """<!-- Made from reproductions/*/conf. -->
# The papers' tables and figures

`fedhet -m +experiment=NAME` runs one, with the paper's numbers beside ours in the
[report](reports.md). A job is one run; words on the command line narrow a table to a row or a cell
(`strategy=fedavg seed=0`). Each file's comments say what the paper leaves open, and where a form
cut down to two CPU cores differs; what a paper's tables share is in the file of
`reproductions/<paper>/conf/base` that it names. [results/](results) has what was run here.
"""


def experiments_page() -> str:
    """Return the page."""
    sections = [_FRAME]
    for folder, paper in _PAPERS.items():
        rows = []
        for name, path in experiment_files().items():
            if not name.startswith(f"{folder}/"):
                continue
            recipe = read_experiment(path)
            _, *parts = recipe["paper"]["source"].split(", ")  # authors, venue and year, table
            what = ", ".join(part for part in parts if not part[-4:].isdigit())
            link = f"[{name}](../{path.relative_to(ROOT).as_posix()})"
            rows.append([link, what, str(number_of_jobs(recipe))])
        sections.append(f"## {paper}\n\n{table(['`+experiment=`', 'what', 'jobs'], rows)}\n")
    return "\n".join(sections)


def number_of_jobs(recipe: Mapping[str, Any]) -> int:
    """Return how many runs an experiment file's own sweep has."""
    params = recipe["hydra"]["sweeper"]["params"]
    words = [f"{key}={value}" for key, value in params.items()]
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    return len(batch)
