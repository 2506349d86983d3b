"""Plots digits that the clients' decoders and the fused ones generate (MA-Echo, Figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Heading
from fedhet.report.colors import AXIS, INK
from fedhet.report.data_file import Partition
from fedhet.report.layout import Layout, first_runs
from fedhet.report.names import plain
from fedhet.report.paper_figures import Partitions
from fedhet.report.partitions import partition_of
from fedhet.report.run_data import Run
from fedhet.reproductions.maecho.decoder_data import Generated, Pixels
from fedhet.reproductions.pictures import FONT, WIDTH, Draw, Spot, picture_grid, set_title

MOST_SHOWN = 16  # decoders
TOP, LEFT = 0.62, 0.1  # inches above and beside the images
MOST_NAMED = 20  # classes
ROUNDING = 2  # of 255


@dataclass(frozen=True)
class DecodedImages:
    """A decoder and its images."""

    run: str  # the label of its run
    client: str  # its client's id; "" for the run's own decoder
    images: Pixels  # (samples, classes, height, width)
    trained: Sequence[bool] | None  # of which classes there were examples; None if unknown
    names: Sequence[str]  # of the classes


def generated_of(run: Run) -> Generated | None:
    """Return the images that were collected of a run."""
    found = run.figures.get("maecho", {}).get("generated")
    return Generated(**found) if found else None


def generated(layout: Layout, partitions: Partitions, stem: Path) -> list[Block]:
    """Return images of each run's decoders: those of its clients, and the final one."""
    runs = first_runs(layout, generated_of)
    if not runs or not can_plot():
        return []
    order = list(map(id, layout.completed))
    runs.sort(key=lambda found: order.index(id(found[1])))
    found = _different([decoder for each in runs for decoder in _decoders(*each, partitions)])
    shown = found[:MOST_SHOWN]
    shapes = [decoder.images.shape for decoder in shown]
    tallest = max(n * rows / (classes * columns) for n, classes, rows, columns in shapes)
    height = TOP + 0.1 + (WIDTH - 2 * LEFT) * tallest
    titled = zip(shown, _titles(shown), strict=True)
    pictures = [_picture(decoder, title, height) for decoder, title in titled]
    caption = _caption(shown, len(found) - len(shown))
    path = stem.with_name(f"{stem.name}_generated")
    return [Heading(3, "Generated digits"), picture_grid(pictures, caption, path, height)]


def _decoders(
    label: str, run: Run, images: Generated, counted: Sequence[Partition]
) -> list[DecodedImages]:
    """Return the clients' decoders, then the run's."""
    partition = partition_of(run, counted)
    counts = None
    names: Sequence[str] = [str(number) for number in range(images.shape[1])]
    if partition is not None and not partition.error:
        counts, names = np.asarray(partition.counts), partition.class_names
    found = []
    for client, packed in images.clients.items() if len(images.clients) > 1 else ():
        trained = None
        if counts is not None and int(client) < len(counts):
            trained = (counts[int(client)] > 0).tolist()
        found.append(DecodedImages(label, client, images.images(packed), trained, names))
    everyone = None if counts is None else (counts.sum(axis=0) > 0).tolist()
    return [*found, DecodedImages(label, "", images.images(images.model), everyone, names)]


def _different(decoders: Sequence[DecodedImages]) -> list[DecodedImages]:
    """Leave out equal images: methods that differ at the server have the same clients."""
    kept: list[DecodedImages] = []
    for decoder in decoders:
        if not any(_same(decoder.images, other.images) for other in kept):
            kept.append(decoder)
    return kept


def _same(one: Pixels, other: Pixels) -> bool:
    """Return whether images are equal up to rounding in a fusion."""
    return one.shape == other.shape and bool(np.abs(one.astype(int) - other).max() <= ROUNDING)


def _titles(decoders: Sequence[DecodedImages]) -> list[str]:
    """Return titles; a client's run is named if clients of several runs are shown."""
    several = len({decoder.run for decoder in decoders if decoder.client}) > 1
    return [
        (f"client {d.client} · {d.run}" if several else f"client {d.client}") if d.client else d.run
        for d in decoders
    ]


def _caption(shown: Sequence[DecodedImages], left_out: int) -> str:
    words = (
        "What each decoder makes of the same latents, drawn from N(0, I), a row each, and of every "
        "class, a column each: the probability of each pixel. First the clients' decoders, if the "
        "run has kept them (checkpoint.client_models=true), then the run's own."
    )
    if any(decoder.trained and not all(decoder.trained) for decoder in shown):
        words += " Grey: classes without examples at its clients."
    words += " Of decoders with the same images one is shown."
    return f"{words} {left_out} further decoders are left out." if left_out else words


def _picture(decoder: DecodedImages, title: str, height: float) -> Draw:
    def draw(spot: Spot) -> None:
        samples, classes, rows, columns = decoder.images.shape
        width = WIDTH - 2 * LEFT
        tall = width * samples * rows / (classes * columns)
        axes = spot.axes(LEFT, height - TOP - tall, width, tall)
        mosaic = decoder.images.transpose(0, 2, 1, 3).reshape(samples * rows, classes * columns)
        axes.imshow(mosaic, cmap="gray", vmin=0, vmax=255, interpolation="none", aspect="auto")
        set_title(axes, title, width)
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        names = decoder.names if len(decoder.names) <= MOST_NAMED else []
        places = [(number + 0.5) * columns - 0.5 for number in range(len(names))]
        axes.set_xticks(places, [plain(name[:4]) for name in names])
        axes.xaxis.tick_top()
        axes.tick_params(length=0, labelsize=FONT, pad=2)
        trained = decoder.trained or [True] * len(places)
        for text, known in zip(axes.get_xticklabels(), trained, strict=bool(places)):
            text.set_color(INK if known else AXIS)
            text.set_fontweight("bold" if known and decoder.trained else "normal")

    return draw
