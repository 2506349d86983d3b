"""Runs side by side: rounds and bytes to targets, and their curves.

    python -m experiments.compare RUN [RUN ...] --by partition.alpha --targets 0.3 0.4 --out DIR

Writes DIR/<name>.md (a table), DIR/<name>.png (a panel for each value of the key ``--by``) and
DIR/<name>.json (the figures), from the runs' config.yaml, metrics.jsonl and summary.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.results import Row, read_rows

COLORS = ("#1b6ca8", "#c8553d", "#4f8a3c", "#8a5a9e", "#b8860b", "#3b4252")


@dataclass(frozen=True)
class Finished:
    """One run: its method, the value of the key that tells the panels apart, and its rows."""

    method: str
    group: str
    rows: Sequence[Row]
    summary: dict[str, Any]

    def accuracies(self) -> list[tuple[int, float]]:
        """Return (round, accuracy) of the evaluated rounds."""
        return [(int(r["round"]), float(r["accuracy"])) for r in self.rows if "accuracy" in r]

    def rounds_to(self, target: float) -> int | None:
        """Return the first round whose accuracy reaches the target."""
        return next((round for round, value in self.accuracies() if value >= target), None)

    def megabytes_to(self, target: float) -> float | None:
        """Return the megabytes up and down until then, all clients together."""
        last = self.rounds_to(target)
        if last is None:
            return None
        rows = [row for row in self.rows if 0 < row["round"] <= last]
        return float(sum(row["bytes_up"] + row["bytes_down"] for row in rows)) / 1e6

    def late_mean(self, rounds: int = 5) -> float:
        """Return the mean accuracy of the last evaluated rounds: single rounds are noisy."""
        values = [value for _, value in self.accuracies()[-rounds:]]
        return sum(values) / len(values)


def read_run(folder: Path, by: str) -> Finished:
    """Read a run's results directory."""
    config = OmegaConf.load(folder / "config.yaml")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return Finished(
        method=summary["strategy"],
        group=str(OmegaConf.select(config, by)),
        rows=read_rows(folder / "metrics.jsonl"),
        summary=summary,
    )


def table(runs: Sequence[Finished], by: str, targets: Sequence[float]) -> str:
    """Return the comparison as a Markdown table."""
    heads = [by, "method", "best", "mean of last 5"]
    heads += [f"rounds to {100 * target:g} %" for target in targets]
    heads += [f"MB to {100 * target:g} %" for target in targets]
    lines = [heads, ["---"] * len(heads)]
    for run in runs:
        best = max(value for _, value in run.accuracies())
        cells = [run.group, run.method, f"{100 * best:.1f}", f"{100 * run.late_mean():.1f}"]
        cells += [_cell(run.rounds_to(target), "d") for target in targets]
        cells += [_cell(run.megabytes_to(target), ".1f") for target in targets]
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def draw(runs: Sequence[Finished], by: str, targets: Sequence[float], path: Path) -> None:
    """Draw accuracy over rounds, a panel for each value of ``by``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = sorted({run.group for run in runs})
    methods = list(dict.fromkeys(run.method for run in runs))
    figure = Figure(figsize=(5.2 * len(groups), 3.9), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        for run in runs:
            if run.group == group:
                x, y = zip(*run.accuracies(), strict=True)
                color = COLORS[methods.index(run.method) % len(COLORS)]
                axes.plot(x, [100 * v for v in y], color=color, lw=1.7, label=run.method)
        for target in targets:
            axes.axhline(100 * target, color="#9aa3b2", lw=0.8, ls=":", zorder=0)
        axes.set_title(f"{by} = {group}", loc="left", fontsize=10)
        axes.set_xlabel("round")
        axes.grid(axis="y", color="#e5e9f0", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("test accuracy (%)")
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(path)


def main() -> None:
    """Compare the runs that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--by", default="partition.alpha")
    parser.add_argument("--targets", nargs="+", type=float, default=[])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--name", default="comparison")
    options = parser.parse_args()
    runs = [read_run(folder, options.by) for folder in options.runs]
    options.out.mkdir(parents=True, exist_ok=True)
    text = table(runs, options.by, options.targets)
    (options.out / f"{options.name}.md").write_text(text, encoding="utf-8")
    draw(runs, options.by, options.targets, options.out / f"{options.name}.png")
    figures = [
        {"method": r.method, "group": r.group, "accuracy": r.accuracies(), "summary": r.summary}
        for r in runs
    ]
    (options.out / f"{options.name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
