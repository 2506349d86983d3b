"""Who holds which classes: read from the runs' class_counts.json, and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedhet.common.results import read_counts
from fedhet.conf import FOLDER_KEYS
from fedhet.report.blocks import Block, Chart, Heading, Paragraph, not_available
from fedhet.report.charts import CONFIG, number, rows_of
from fedhet.report.data_file import Partition, ReportData
from fedhet.report.run_data import Run

MOST_PARTITIONS = 12
TITLE_KEYS = ("alpha", "classes", "shards_per_client", "min_size", "seed")
MOST_NUMBERED = 250  # cells with room for their count
_IRRELEVANT = (  # keys of the task that leave the partition as it is
    "model model_options head_bias head_init stem classifier classifier_tensors lora loss "
    "class_weights mean std flip crop_padding crop_padding_mode crop_probability test_size"
).split()
Counts = NDArray[np.int64]  # (N, C)


def with_partitions(data: ReportData) -> ReportData:
    """Return the data with who holds which classes, of those runs whose partition it lacks."""
    settings = [_deciding(partition.settings) for partition in data.partitions]
    found = [(p, run) for p, run in partitions_of(data.runs) if p.settings not in settings]
    counted = [_counted(partition, run) for partition, run in found[:MOST_PARTITIONS]]
    reason = f"only the first {MOST_PARTITIONS} partitions are shown"
    left_out = [replace(partition, error=reason) for partition, _ in found[MOST_PARTITIONS:]]
    return replace(data, partitions=[*data.partitions, *counted, *left_out])


def partitions_of(runs: Sequence[Run]) -> list[tuple[Partition, Run]]:
    """Return the runs' partitions without counts, each with its run: of a recipe the lowest seed.

    Runs with figures of their paper come first, since these may show the counts.
    """
    found: list[tuple[Partition, Run]] = []
    identities: list[dict[str, Any]] = []
    for run in sorted(runs, key=lambda run: (not run.figures, run.seed or 0)):
        settings = _settings(run)
        identity = _without(settings, "seed", *FOLDER_KEYS)
        if settings and identity not in identities:
            identities.append(identity)
            found.append((_uncounted(settings), run))
    return found


def partition_of(run: Run, partitions: Sequence[Partition]) -> Partition | None:
    """Return the partition of the run's recipe and seed; None if it is not among these."""
    wanted = _without(_settings(run), *FOLDER_KEYS)
    found = (p for p in partitions if _without(_deciding(p.settings), *FOLDER_KEYS) == wanted)
    return next(found, None) if wanted else None


def _counted(partition: Partition, run: Run) -> Partition:
    if run.folder is None:
        return replace(partition, error="the data file has no counts")
    return replace(partition, **read_counts(run.folder))


def _without(settings: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that decide the run's partition; empty if they are unknown."""
    if not {"task.name", "partition.name"} <= set(run.settings):
        return {}
    return _deciding({"clients": None, **run.settings, "seed": run.seed})


def _deciding(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in settings.items()
        if (key.startswith("partition.") and key != "partition.unseen")
        or (key.startswith("task.") and key.split(".")[1] not in _IRRELEVANT)
        or key in ("clients", "seed")
    }


def _uncounted(settings: Mapping[str, Any]) -> Partition:
    clients, start = int(settings["clients"] or 0), "partition."
    partition = {k.removeprefix(start): v for k, v in settings.items() if k.startswith(start)}
    size = settings.get("task.train_size")
    chosen = chosen_values(partition, clients=clients, seed=settings["seed"], train_size=size)
    title = partition_title(settings["task.name"], settings["partition.name"], chosen)
    return Partition(title, settings, clients=clients)


def chosen_values(
    partition: Mapping[str, Any], *, clients: int, seed: int, train_size: int | None
) -> dict[str, Any]:
    """Return the settings that identify a partition of its flavour, in the order of a title."""
    chosen: dict[str, Any] = {"clients": clients}
    chosen |= {key: partition[key] for key in TITLE_KEYS if partition.get(key) is not None}
    chosen.setdefault("seed", seed)
    return chosen | ({} if train_size is None else {"train_size": train_size})


def partition_title(task: str, flavour: str, chosen: Mapping[str, Any]) -> str:
    """Return a title such as ``digits, dirichlet: clients=10 alpha=0.1 seed=0``."""
    return f"{task}, {flavour}: " + " ".join(f"{key}={value}" for key, value in chosen.items())


def partition_blocks(found: Sequence[Partition], stem: Path) -> list[Block]:
    """Return how many examples of each class the clients hold, and what could not be counted."""
    if not found:
        return []
    shown = [p for p in found if not p.error]
    blocks: list[Block] = [Heading(2, "Partition: who holds which classes")]
    if any(partition.settings.get("partition.seed") is None for partition in shown):
        blocks.append(Paragraph("Each seed draws its own partition; the first one is shown."))
    for place, one in enumerate(shown, 1):
        counts = np.asarray(one.counts)
        few = len(counts) < one.clients
        words = [f"The first {len(counts)} of {one.clients} clients."] if few else []
        sizes, held = counts.sum(axis=1), np.count_nonzero(counts, axis=1)
        words += [
            f"{what} per client: {each.min()} to {each.max()}, median {np.median(each):.0f}."
            for what, each in (("Examples", sizes), ("Classes", held))
        ]
        name, caption = f"{stem.name}_partition_{place}", " ".join(words)
        chart = partition_chart(counts, one.class_names, one.title, caption, name)
        blocks += [Heading(3, one.title), chart]
    return blocks + not_available([f"{p.title}: {p.error}" for p in found if p.error])


def partition_chart(
    counts: Counts, names: Sequence[str], title: str, caption: str, name: str
) -> Chart:
    """Define the clients' sizes, and below them clients by classes, darker for more examples.

    ``name`` is that of the picture; the counts are written into the cells if there are few.
    """
    clients, classes = counts.shape
    cells = pd.DataFrame(np.argwhere(counts), columns=["client", "place"])
    cells["examples"] = counts[cells["client"], cells["place"]]
    cells["class"] = [names[place] for place in cells["place"]]
    width, height = int(np.clip(28 * clients, 320, 900)), int(np.clip(22 * classes, 120, 560))
    at = {"field": "client", "type": "ordinal", "scale": {"domain": list(range(clients))}}
    bare = {**at, "axis": None}
    across = {**at, "axis": {"labelAngle": 0, "labelOverlap": True}}
    up = {"field": "class", "type": "nominal", "scale": {"domain": list(names)}}
    up["axis"] = {"labelOverlap": True}
    shade = {"type": "sqrt", "scheme": "yellowgreenblue", "domainMin": 0}
    color = number("examples", "examples") | {"scale": shade}
    said = [{"field": field} for field in ("client", "class", "examples")]
    sizes = {"aggregate": "sum", "field": "examples", "title": "examples"}
    heat: dict[str, Any] = {"mark": "rect", "encoding": {"color": color, "tooltip": said}}
    dark = {"test": f"datum.examples > {0.4 * int(counts.max())}", "value": "white"}
    text = {"text": {"field": "examples"}, "color": {"condition": dark, "value": "#1c2733"}}
    texts = {"mark": {"type": "text", "fontSize": 9}, "encoding": text}
    above = {
        **{"width": width, "height": 60, "mark": {"type": "bar", "color": "#7a8797"}},
        "encoding": {"x": bare, "y": {**sizes, "axis": {"tickCount": 3}}},
    }
    below = {
        **{"width": width, "height": height, "encoding": {"x": across, "y": up}},
        "layer": [heat, *([texts] if counts.size <= MOST_NUMBERED else [])],
    }
    spec = {"title": title, "vconcat": [above, below], "config": CONFIG}
    return Chart(caption, {"": spec}, {name: spec}, rows_of(cells))
