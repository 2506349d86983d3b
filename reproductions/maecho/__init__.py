"""MA-Echo's own figures: generated digits (Figure 4), neurons (5) and the fusion's path (3, 6, 7).

Su et al., MA-Echo, Neural Networks 2023.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhet.report.blocks import Block
from fedhet.report.layout import Layout
from fedhet.report.paper_figures import Partitions, Say
from fedhet.reproductions.maecho.decoder_data import CLIENTS, read_generated
from fedhet.reproductions.maecho.fusion_path_plot import fusion
from fedhet.reproductions.maecho.generated_images import generated
from fedhet.reproductions.maecho.neuron_plot import neurons
from fedhet.reproductions.subprocess_call import CallError, call

TIMEOUT_SECONDS = 900


def collect(folder: Path, settings: Mapping[str, Any], say: Say) -> dict[str, Any] | None:
    """Return the digits or the fusion of a run (``PaperFigures.collect``).

    A process of its own replays the fusion of the clients' models (checkpoint.client_models).
    """
    images = read_generated(folder, settings)
    if images is not None:
        return {"generated": dataclasses.asdict(images)}
    if not can_replay(folder, settings):
        return None
    say(f"replaying the fusion of the clients' models of {folder.name}")
    try:
        found = call("fedhet.reproductions.maecho.replay_fusion", str(folder), TIMEOUT_SECONDS)
    except CallError as error:
        found = {"fusion": {"error": f"the fusion could not be replayed: {error}"}}
    return {name: each for name, each in found.items() if each} or None


def can_replay(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether a run has an iterated fusion of classifiers, and its clients' models."""
    iterated = "strategy.methods.maecho" in settings
    return iterated and settings.get("task.model") != "cvae" and (folder / CLIENTS).is_file()


def sections(layout: Layout, partitions: Partitions, stem: Path) -> list[Block]:
    """Return the figures of the runs (``PaperFigures.sections``)."""
    images = generated(layout, partitions, stem)
    return images + fusion(layout, stem) + neurons(layout, stem)
