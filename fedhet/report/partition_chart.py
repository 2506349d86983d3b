"""The chart of a partition: how many examples of each class each client holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fedhet.report.blocks import Chart
from fedhet.report.charts import CONFIG, number, rows_of

TITLE_KEYS = ("alpha", "classes", "shards_per_client", "min_size", "seed")
MOST_NUMBERED = 250  # cells with room for their count
Counts = NDArray[np.int64]  # (N, C)


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
    spec = {
        "title": title,
        "vconcat": [
            {
                **{"width": width, "height": 60, "mark": {"type": "bar", "color": "#7a8797"}},
                "encoding": {"x": bare, "y": {**sizes, "axis": {"tickCount": 3}}},
            },
            {
                **{"width": width, "height": height, "encoding": {"x": across, "y": up}},
                "layer": [heat, *([texts] if counts.size <= MOST_NUMBERED else [])],
            },
        ],
        "config": CONFIG,
    }
    return Chart(caption, {"": spec}, {name: spec}, rows_of(cells))
