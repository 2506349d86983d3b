"""docs/experiments.md: the papers' tables and figures that there is an experiment file for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from docs.generator.markdown import table
from fedhet.conf import FOLDER

_PAPERS = {
    "fedpvr": "FedPVR (Li et al., CVPR 2023)",
    "feddw": "FedDW (Liu et al., 2024)",
    "fedmrur": "FedMRUR (An et al., NeurIPS 2023)",
    "maecho": "MA-Echo (Su et al., Neural Networks 2023)",
    "scale": "Time and bytes (no paper's: [results/scale.md](results/scale.md))",
}
_FRAME = """<!-- Made by `make docs` from conf/experiment. -->
# The papers' tables and figures

`fedhet -m +experiment=NAME` runs one, with the paper's numbers beside ours in the
[report](reports.md). A job is one run; words on the command line narrow a table to a row or a cell
(`strategy=fedavg seed=0`). Each file's comments describe the full table, and where a form cut
down to two CPU cores differs. [results/](results) has what was run here.
"""


def experiments_page() -> str:
    """Return the page."""
    sections = [_FRAME]
    for folder, paper in _PAPERS.items():
        rows = []
        for path in sorted((FOLDER / "experiment" / folder).glob("*.yaml")):
            recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
            _, *parts = recipe["paper"]["source"].split(", ")  # authors, venue and year, table
            what = ", ".join(part for part in parts if not part[-4:].isdigit())
            name = f"{folder}/{path.stem}"
            link = f"[{name}](../conf/experiment/{name}.yaml)"
            rows.append([link, what, str(number_of_jobs(recipe))])
        sections.append(f"## {paper}\n\n{table(['`+experiment=`', 'what', 'jobs'], rows)}\n")
    return "\n".join(sections)


def number_of_jobs(recipe: Mapping[str, Any]) -> int:
    """Return how many runs an experiment file's own sweep has."""
    params = recipe["hydra"]["sweeper"]["params"]
    words = [f"{key}={value}" for key, value in params.items()]
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    return len(batch)
