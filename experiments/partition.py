"""fedhet-partition: shows how a recipe spreads its training examples over the clients.

    fedhet-partition task=cifar10 partition=dirichlet partition.alpha=0.1 clients=10

prints a table, clients by classes, and saves a picture of it below results/partitions/.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from hydra.errors import HydraException
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from conf import compose, plain_part
from tasks import ConfigError, Task, build_task

FOLDER = Path("results") / "partitions"
MAX_TABLE_CLIENTS = 100
MAX_NUMBERED_CELLS = 250
Counts = NDArray[np.int64]  # (N, C)


def main() -> None:
    """Run the command."""
    words = sys.argv[1:]
    if any(word in ("-h", "--help") for word in words):
        print(__doc__)
        return
    console = Console()
    try:
        task, title, name = _build(words)
        counts = task.class_counts()
    except (ConfigError, HydraException) as error:
        Console(stderr=True).print(f"fedhet-partition: {error}", style="red", markup=False)
        raise SystemExit(2) from None
    console.print(_table(counts, task.class_names, title, console.width))
    for line in _summary(task, counts):
        console.print(line, highlight=False)
    path = (FOLDER / f"{name}.png").absolute()
    draw(counts, task.class_names, title, path)
    console.print(f"picture: {path}", soft_wrap=True, highlight=False)


def _build(words: list[str]) -> tuple[Task, str, str]:
    """Return the task, a title, and a file name."""
    recipe = compose({"overrides": json.dumps(words)})
    partition = plain_part(recipe, "partition")
    task_values = plain_part(recipe, "task")
    clients, seed = int(recipe.clients), int(recipe.seed)
    if clients == 0:
        raise ConfigError("clients=0 takes N from the connected SuperNodes: here, set clients")
    task = build_task(task_values, partition, seed=seed, num_clients=clients)
    keys = ("alpha", "classes", "shards_per_client", "min_size", "seed")
    chosen: dict[str, Any] = {key: partition[key] for key in keys if partition.get(key) is not None}
    chosen = {"clients": clients, **chosen}
    chosen.setdefault("seed", seed)
    if task.config.train_size is not None:
        chosen["train_size"] = task.config.train_size
    title = " ".join(f"{key}={value}" for key, value in chosen.items())
    name = "-".join(f"{key}{value}" for key, value in chosen.items())
    flavour = partition["name"]
    return task, f"{task.name}, {flavour}: {title}", f"{task.name}-{flavour}-{name}"


# ---- the table -----------------------------------------------------------------------------------


def _table(counts: Counts, names: tuple[str, ...], title: str, width: int) -> Table:
    """Return clients by classes, or where that is too wide each client's largest classes."""
    table = Table(title=title, caption="examples of each class; a dot: none", box=SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("client", justify="right", style="bold")
    table.add_column("total", justify="right", style="bold")
    cells_width = sum(max(len(name), len(str(counts.max()))) + 2 for name in names)
    wide = cells_width + 16 > width
    for column in ("classes", "largest") if wide else names:
        table.add_column(column, justify="left" if column == "largest" else "right")
    for client, row in enumerate(counts[:MAX_TABLE_CLIENTS]):
        cells = _largest(row, names) if wide else [str(count) if count else "·" for count in row]
        table.add_row(str(client), str(row.sum()), *cells)
    if (hidden := len(counts) - MAX_TABLE_CLIENTS) > 0:
        table.add_row("...", f"{hidden} more")
    return table


def _largest(row: Counts, names: tuple[str, ...]) -> list[str]:
    order = np.argsort(-row, kind="stable")[:6]
    listed = ", ".join(f"{names[label]}: {row[label]}" for label in order if row[label])
    return [str(np.count_nonzero(row)), listed]


def _summary(task: Task, counts: Counts) -> list[str]:
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    used = np.unique(np.concatenate(task.client_rows))
    lines = [
        f"examples a client: {sizes.min()} to {sizes.max()}, median {np.median(sizes):.0f}; "
        f"classes a client: {held.min()} to {held.max()}, median {np.median(held):.0f}"
    ]
    if unused := len(task.train_split) - len(used):
        lines.append(f"with no client: {unused} of {len(task.train_split)} examples")
    if repeated := int(sizes.sum()) - len(used):
        lines.append(f"repeated: {repeated} of the {sizes.sum()} examples that clients hold")
    return lines


# ---- the picture ---------------------------------------------------------------------------------


def draw(counts: Counts, names: tuple[str, ...], title: str, path: Path) -> None:
    """Save the picture: sizes above, and below clients by classes, darker for more examples.

    Raises:
        SystemExit: where matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("the picture needs matplotlib: pip install 'fedhet[plots]'") from None

    clients, classes = counts.shape
    rows = float(np.clip(0.36 * classes, 2.6, 9))  # inches of the lower part
    width = float(np.clip(0.42 * clients, 6, 15)) + 1.6
    figure = Figure(figsize=(width, rows + 2.2), layout="constrained")
    FigureCanvasAgg(figure)
    sizes_axes, axes = figure.subplots(2, 1, sharex=True, height_ratios=[1.1, rows])
    figure.suptitle(title, fontsize=11)
    sizes_axes.bar(range(clients), counts.sum(axis=1), width=0.82, color="#7a8797")
    sizes_axes.set_ylabel("examples")
    sizes_axes.spines[["top", "right"]].set_visible(False)
    sizes_axes.tick_params(axis="x", which="both", bottom=False, labelbottom=False)
    shown = np.ma.masked_equal(counts.T, 0)  # white: none
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, int(counts.max())))
    image = axes.imshow(shown, aspect="auto", cmap="YlGnBu", norm=norm, interpolation="nearest")
    axes.set_xlabel("client")
    axes.set_ylabel("class")
    axes.set_yticks(_ticks(classes, 40), [names[label] for label in _ticks(classes, 40)])
    axes.set_xticks(_ticks(clients, 40))
    _draw_grid(axes, clients, classes)
    if counts.size <= MAX_NUMBERED_CELLS:
        _draw_numbers(axes, counts)
    figure.colorbar(image, ax=axes, label="examples", pad=0.01, aspect=30, fraction=0.05)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _ticks(count: int, most: int) -> range:
    steps = (step * scale for scale in (1, 10, 100, 1000) for step in (1, 2, 5))
    return range(0, count, next(step for step in steps if count / step <= most))


def _draw_grid(axes: Any, clients: int, classes: int) -> None:
    axes.spines[:].set_color("#c4cad1")
    if clients > 150 or classes > 100:  # lines so close would hide the cells
        return
    axes.set_xticks(np.arange(clients + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(classes + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="#e3e6ea", linewidth=0.5)
    axes.tick_params(which="minor", length=0)


def _draw_numbers(axes: Any, counts: Counts) -> None:
    dark = 0.25 * counts.max()
    for client, row in enumerate(counts):
        for label, count in enumerate(row):
            if count:
                colour = "white" if count > dark else "#1c2733"
                axes.text(
                    client, label, str(count), ha="center", va="center", fontsize=7, color=colour
                )


if __name__ == "__main__":
    main()
