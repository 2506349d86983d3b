"""Checkpoints and clients' heads as runs leave them, made by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Tensor = Any


def random_relations(seed: int, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Return a matrix of soft labels (C, C) whose rows sum to 1, and a weight (C, 6)."""
    generator = np.random.default_rng(seed)
    labels = generator.dirichlet(np.ones(classes), size=classes).astype(np.float32)
    return labels, generator.normal(0, 0.7, (classes, 6)).astype(np.float32)


def write_soft_labels(folder: Path, labels: Tensor, weight: Tensor, after: int = 3) -> None:
    """Add a checkpoint with SL (C, C) and the classifier's weight (C, d)."""
    tensors = {"state/soft_labels/soft_labels/means": labels, "params/head.weight": weight}
    _save(folder / "checkpoints", tensors, after)


def write_own_heads(folder: Path, heads: Mapping[int, Tensor], after: int = 3) -> None:
    """Add clients' own heads (C, d), which the server has taken in the same round."""
    committed = {str(client): after for client in heads}
    body = {"params/body.weight": np.ones(2)}
    _save(folder / "checkpoints", body, after, experiment="e1", committed=committed)
    for client, weight in heads.items():
        write_state(folder, client, {"personal/head.weight": weight}, after)


def write_state(
    folder: Path, client: int, tensors: Mapping[str, Tensor], after: int, experiment: str = "e1"
) -> None:
    """Add what a client keeps after a round."""
    _save(folder / "client_state" / experiment / f"client-{client:05d}", tensors, after)


def _save(folder: Path, tensors: Mapping[str, Tensor], after: int, **about: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: np.asarray(value, dtype=np.float32) for name, value in tensors.items()}
    metadata = {"fedhet": json.dumps({"round": after, **about})}
    save_file(found, folder / f"round-{after:06d}.safetensors", metadata)
