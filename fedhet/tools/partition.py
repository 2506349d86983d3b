"""fedhet-partition: shows how a recipe divides its training examples among the clients.

    fedhet-partition task=cifar10 partition=dirichlet partition.alpha=0.1 clients=10

It prints a table, clients by classes, and saves a plot of it below results/partitions/. It counts
examples of a regression by tenths of their targets, or all together if a function gives each client
its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedhet.commands import reported_errors, table_console
from fedhet.common.errors import ConfigError
from fedhet.common.files import writable_folder
from fedhet.common.results import BY_CLIENT
from fedhet.conf import compose, plain_part
from fedhet.natural_clients import with_natural_clients
from fedhet.report.blocks import can_draw
from fedhet.report.partitions import Counts, chosen_values, partition_chart, partition_title
from fedhet.tasks import AnyTask, OwnTask, Task, build_task

FOLDER = Path("results") / "partitions"
MAX_TABLE_CLIENTS = 100


def main() -> None:
    """Run the command."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        print(__doc__)
        return
    console = table_console()
    with reported_errors("fedhet-partition"):
        task, title, name = _build(words)
        counts = task.class_counts()
        names = task.count_names
        console.print(_table(counts, names, title, console.width, task.client_names))
        for line in _summary(task, counts):
            console.print(line, highlight=False, markup=False)
        path = (FOLDER / f"{name}.png").absolute()
        draw(counts, names, title, path)
    console.print(f"plot: {path}", soft_wrap=True, highlight=False, markup=False)


def _build(words: list[str]) -> tuple[AnyTask, str, str]:
    """Return the task, a title, and a file name."""
    recipe = compose({"overrides": json.dumps(words)})
    with_natural_clients(recipe, words)
    partition, task_values = plain_part(recipe, "partition"), plain_part(recipe, "task")
    clients, seed = int(recipe.clients), int(recipe.seed)
    if clients == 0:
        raise ConfigError("clients=0 takes the number from the connected SuperNodes: set clients")
    task = build_task(task_values, partition, seed=seed, num_clients=clients)
    train_size = task.config.train_size if isinstance(task, Task) else None
    chosen = chosen_values(partition, clients=clients, seed=seed, train_size=train_size)
    flavour = partition["name"]
    if task.by_client:
        flavour, chosen = BY_CLIENT, {"clients": clients, "seed": seed}  # no partition was drawn
    title = partition_title(task.name, flavour, chosen)
    name = "-".join(f"{key}{value}" for key, value in chosen.items())
    return task, title, f"{task.name}-{flavour.replace(' ', '_')}-{name}"


def _table(
    counts: Counts, names: tuple[str, ...], title: str, width: int, clients: Sequence[str] = ()
) -> Table:
    """Return a table of clients by classes, or if too wide, of each client's largest classes."""
    table = Table(title=title, caption="examples of each class; dot: none", box=SIMPLE_HEAD)
    table.padding = (0, 1, 0, 0)
    table.add_column("client", justify="right", style="bold")
    table.add_column("total", justify="right", style="bold")
    wide = 16 + sum(max(len(name), len(str(counts.max()))) + 2 for name in names) > width
    for column in ("classes", "largest") if wide else names:
        table.add_column(column, justify="left" if column == "largest" else "right")
    for client, row in enumerate(counts[:MAX_TABLE_CLIENTS]):
        cells = _largest(row, names) if wide else [str(count) if count else "·" for count in row]
        name = f"{client} {clients[client]}" if clients else str(client)
        table.add_row(name, str(row.sum()), *cells)
    if (hidden := len(counts) - MAX_TABLE_CLIENTS) > 0:
        table.add_row("...", f"{hidden} more")
    return table


def _largest(row: Counts, names: tuple[str, ...]) -> list[str]:
    order = np.argsort(-row, kind="stable")[:6]
    listed = ", ".join(f"{names[label]}: {row[label]}" for label in order if row[label])
    return [str(np.count_nonzero(row)), listed]


def _summary(task: AnyTask, counts: Counts) -> list[str]:
    sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
    lines = [f"examples a client: {sizes.min()} to {sizes.max()}, median {np.median(sizes):.0f}"]
    if counts.shape[1] > 1:
        classes = f"classes a client: {held.min()} to {held.max()}, median {np.median(held):.0f}"
        lines = [f"{lines[0]}; {classes}"]
    if isinstance(task, OwnTask) and task.by_client:
        return [*lines, f"task.data={task.config.data} gives each client its own"]
    used, total = np.unique(np.concatenate(task.client_rows)), task.num_train
    if unused := total - len(used):
        lines.append(f"with no client: {unused} of {total} examples")
    if repeated := int(sizes.sum()) - len(used):
        lines.append(f"repeated: {repeated} of the {sizes.sum()} examples that clients hold")
    return lines


def draw(counts: Counts, names: tuple[str, ...], title: str, path: Path) -> None:
    """Save the plot as PNG, and as SVG beside it."""
    if not can_draw():
        raise ConfigError("the plot needs vl-convert-python: pip install -e '.[plots]'")
    writable_folder(path.parent, "")
    partition_chart(counts, names, title, "", path.stem).save(path.parent)


if __name__ == "__main__":
    main()
