"""Digits that decoders generate, each client's beside the fused ones (MA-Echo, Figure 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedhet.plot import can_plot
from fedhet.report.blocks import Block, Heading
from fedhet.report.class_counts import partition_of
from fedhet.report.curves import AXIS, INK
from fedhet.report.data_file import Partition
from fedhet.report.layout import Layout, first_runs
from fedhet.report.run_data import Run
from fedhet.report.side_by_side import FONT, WIDTH, Picture, Spot, picture_gallery, set_title
from reproductions.maecho.decoder_data import Pixels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_SHOWN = 16  # decoders
TOP, LEFT = 0.62, 0.1  # inches above and beside the images
FADED = AXIS  # a class that the decoder has not been trained on
MOST_NAMED = 20  # classes
ROUNDING = 2  # of 255


@dataclass(frozen=True)
class Decoder:
    """A decoder and its images.

    Args:
        run: the label of its run.
        client: whose it is; "": the run's own.
        images: (samples, classes, height, width).
        trained: of which classes there were examples; None where that is not known.
        names: of the classes.
    """

    run: str
    client: str
    images: Pixels
    trained: Sequence[bool] | None
    names: Sequence[str]


def generated(
    layout: Layout, partitions: Callable[[], Sequence[Partition]], stem: Path
) -> list[Block]:
    """Return images that each run's decoders generate: those of its clients, and the final one.

    Args:
        layout: rows and columns.
        partitions: returns who holds which classes.
        stem: how the picture's name begins.
    """
    runs = first_runs(layout, lambda run: run.generated is not None)
    runs.sort(key=lambda pair: _column(layout, pair[1]))
    if not runs or not can_plot():
        return []
    counted = partitions()
    found = _different([d for label, run in runs for d in _decoders(label, run, counted)])
    shown = found[:MOST_SHOWN]
    path = stem.with_name(f"{stem.name}_generated")
    height = _height(shown)
    titled = zip(shown, _titles(shown), strict=True)
    pictures = [_picture(decoder, title, height) for decoder, title in titled]
    caption = _caption(shown, len(found) - len(shown))
    return [Heading(3, "Generated digits"), picture_gallery(pictures, caption, path, height)]


def _decoders(label: str, run: Run, counted: Sequence[Partition]) -> list[Decoder]:
    """Return the clients' decoders, and behind them the run's."""
    assert run.generated is not None
    partition = partition_of(run, counted)
    counts = None
    names: Sequence[str] = [str(number) for number in range(run.generated.shape[1])]
    if partition is not None and not partition.error:
        counts, names = np.asarray(partition.counts), partition.class_names
    found = []
    clients = run.generated.clients if len(run.generated.clients) > 1 else {}
    for client, packed in clients.items():
        held = counts is not None and int(client) < len(counts)
        trained = (counts[int(client)] > 0).tolist() if held and counts is not None else None
        found.append(Decoder(label, client, run.generated.images(packed), trained, names))
    everyone = None if counts is None else (counts.sum(axis=0) > 0).tolist()
    final = run.generated.images(run.generated.model)
    return [*found, Decoder(label, "", final, everyone, names)]


def _different(decoders: Sequence[Decoder]) -> list[Decoder]:
    """Leave out what was shown already: methods that differ at the server have the same clients."""
    kept: list[Decoder] = []
    for decoder in decoders:
        if not any(_same(decoder.images, other.images) for other in kept):
            kept.append(decoder)
    return kept


def _same(one: Pixels, other: Pixels) -> bool:
    """Return whether nobody could tell images apart: rounding in a fusion is no difference."""
    return one.shape == other.shape and bool(np.abs(one.astype(int) - other).max() <= ROUNDING)


def _column(layout: Layout, run: Run) -> int:
    """Return the layout's column that a run is in."""
    return next(
        number
        for number in range(len(layout.columns))
        if any(run is member for line in layout.lines for member in line.cells[number].runs)
    )


def _titles(decoders: Sequence[Decoder]) -> list[str]:
    """Return names; a client's run is named where clients of several runs are shown."""
    several = len({decoder.run for decoder in decoders if decoder.client}) > 1
    return [
        (f"client {d.client} · {d.run}" if several else f"client {d.client}") if d.client else d.run
        for d in decoders
    ]


def _caption(shown: Sequence[Decoder], left_out: int) -> str:
    words = [
        "What each decoder makes of the same latents, drawn from N(0, I), a row each, and of every "
        "class, a column each: the probability of each pixel. First the decoders of the clients, "
        "where the run has kept them (checkpoint.client_models=true), then the run's own."
    ]
    if any(decoder.trained and not all(decoder.trained) for decoder in shown):
        words.append("Grey: classes of which its clients had no example.")
    words.append("A decoder whose images are the same as another's is shown once.")
    if left_out:
        words.append(f"{left_out} further decoders are left out.")
    return " ".join(words)


# ---- drawing -------------------------------------------------------------------------------------


def _height(shown: Sequence[Decoder]) -> float:
    """Return inches enough for the tallest picture."""
    ratios = [d.images.shape[0] * d.images.shape[2] / _columns(d) for d in shown]
    return TOP + 0.1 + (WIDTH - 2 * LEFT) * float(max(ratios))


def _columns(decoder: Decoder) -> int:
    return int(decoder.images.shape[1] * decoder.images.shape[3])


def _picture(decoder: Decoder, title: str, height: float) -> Picture:
    return Picture(title, lambda spot: _draw(spot, decoder, title, height))


def _draw(spot: Spot, decoder: Decoder, title: str, height: float) -> None:
    samples, classes, rows, columns = decoder.images.shape
    width = WIDTH - 2 * LEFT
    tall = width * samples * rows / (classes * columns)
    axes = spot.axes(LEFT, height - TOP - tall, width, tall)
    mosaic = decoder.images.transpose(0, 2, 1, 3).reshape(samples * rows, classes * columns)
    axes.imshow(mosaic, cmap="gray", vmin=0, vmax=255, interpolation="none", aspect="auto")
    set_title(axes, title, width)
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    _name_classes(axes, decoder, columns)


def _name_classes(axes: Axes, decoder: Decoder, columns: int) -> None:
    if len(decoder.names) > MOST_NAMED:
        axes.set_xticks([])
        return
    places = [(number + 0.5) * columns - 0.5 for number in range(len(decoder.names))]
    axes.set_xticks(places, [name[:4] for name in decoder.names])
    axes.tick_params(
        top=True, bottom=False, labeltop=True, labelbottom=False, length=0, labelsize=FONT, pad=2
    )
    trained = decoder.trained or [True] * len(places)
    for text, known in zip(axes.get_xticklabels(), trained, strict=True):
        text.set_color(INK if known else FADED)
        text.set_fontweight("bold" if known and decoder.trained else "normal")
