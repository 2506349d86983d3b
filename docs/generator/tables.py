"""docs/experiments.md: the papers' tables and figures that there is an experiment file for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from conf import FOLDER
from docs.generator.page import table
from docs.generator.recipes import ROOT

PAGE = ROOT / "docs" / "fedhet.md"
_PAPERS = {
    "fedpvr": "FedPVR (Li et al., CVPR 2023)",
    "feddw": "FedDW (Liu et al., 2024)",
    "fedmrur": "FedMRUR (An et al., NeurIPS 2023)",
    "maecho": "MA-Echo (Su et al., Neural Networks 2023)",
}
_FRAME = """<!-- Made by `make docs` from conf/experiment. -->
# The papers' tables and figures

`fedhet -m +experiment=NAME` runs one, with the paper's numbers beside ours in the
[report](reports.md). A job is one run; words on the command line narrow a table to a row or a cell
(`strategy=fedavg seed=0`). The files say in their comments what a full one is, and where a form cut
down to two CPU cores differs. What was run here is in [results/](results).
"""


def experiments_page() -> str:
    """Return the page."""
    return "\n".join([_FRAME, *_sections()])


def _sections() -> Iterator[str]:
    for folder, paper in _PAPERS.items():
        files = sorted((FOLDER / "experiment" / folder).glob("*.yaml"))
        rows = [_row(path) for path in files]
        yield f"## {paper}\n\n{table(['`+experiment=`', 'what', 'jobs'], rows)}\n"


def _row(path: Path) -> list[str]:
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    name = f"{path.parent.name}/{path.stem}"
    _, _, what = recipe["paper"]["source"].partition(", ")
    return [f"[{name}](../conf/experiment/{name}.yaml)", _after_year(what), str(jobs_of(recipe))]


def _after_year(source: str) -> str:
    """Return what follows the venue and the year of a source: "CVPR 2023, Table 2" has Table 2."""
    head, _, rest = source.partition(", ")
    return rest if head[-4:].isdigit() else source


def jobs_of(recipe: Mapping[str, Any]) -> int:
    """Return how many runs an experiment file's own sweep has."""
    params = recipe["hydra"]["sweeper"]["params"]
    words = [f"{key}={value}" for key, value in params.items()]
    (batch,) = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    return len(batch)
