"""Converts data files of format 1: other keys in recipes, and figures beside the runs' fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedhet.conf.renamed import upgrade_config
from fedhet.report.run_data import flat

# Fields of a run in format 1 that packages of reproductions/ have collected.
PACKAGES = {
    "relations": "feddw",
    "head_norms": "feddw",
    "generated": "maecho",
    "fusion": "maecho",
    "neurons": "maecho",
}


def upgraded(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a data file of format 1 as the present format has it."""
    papers = [_paper(paper) for paper in content["papers"]]
    runs = [_run(run, content["common"]) for run in content["runs"]]
    partitions = [{**p, "settings": _upgraded_keys(p["settings"])} for p in content["partitions"]]
    return {**content, "common": {}, "papers": papers, "runs": runs, "partitions": partitions}


def _run(run: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    figures: dict[str, dict[str, Any]] = {}
    for part, package in PACKAGES.items():
        if run.get(part):
            figures.setdefault(package, {})[part] = run[part]
    kept = {key: value for key, value in run.items() if key not in PACKAGES}
    own = run["settings"]
    settings = None if own is None else _upgraded_keys({**common, **own})
    return {**kept, "settings": settings, "figures": figures}


def _paper(paper: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``paper`` node whose columns and rows select runs by the present keys."""
    rows = dict(paper.get("rows") or {})
    for label, row in rows.items():
        if row.get("runs"):
            rows[label] = {**row, "runs": _upgraded_keys(flat(row["runs"]))}
    columns = {k: _upgraded_keys(flat(v)) for k, v in (paper.get("columns") or {}).items()}
    return {**paper, "rows": rows, "columns": columns}


def _upgraded_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with dotted keys by their present names; ``strategy`` names the method."""
    others = {key: value for key, value in settings.items() if key != "strategy"}
    method = {"strategy": settings["strategy"]} if "strategy" in settings else {}
    return method | upgrade_config(others)
