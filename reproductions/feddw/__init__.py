"""FedDW's own figures: class relations (Figure 8) and weight norms (Figure 4).

Liu et al., FedDW, https://arxiv.org/abs/2412.04521.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedhet.report.blocks import Block
from fedhet.report.layout import Layout
from fedhet.report.paper_figures import Partitions, Say
from fedhet.reproductions.feddw.class_relations import relations_section
from fedhet.reproductions.feddw.classifier_data import read_head_norms, read_relations
from fedhet.reproductions.feddw.weight_norms import norms_section


def collect(folder: Path, settings: Mapping[str, Any], say: Say) -> dict[str, Any] | None:
    """Return the soft labels and classifiers of a run (``PaperFigures.collect``)."""
    found = {"relations": read_relations(folder), "head_norms": read_head_norms(folder)}
    return {name: dataclasses.asdict(each) for name, each in found.items() if each} or None


def sections(layout: Layout, partitions: Partitions, stem: Path) -> list[Block]:
    """Return the figures of the runs (``PaperFigures.sections``)."""
    return relations_section(layout, partitions, stem) + norms_section(layout, partitions, stem)
