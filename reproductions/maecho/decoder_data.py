"""Decodes images from a CVAE's final decoder and from those of its clients (MA-Echo, Figure 4).

A decoder is a chain of linear layers with ReLU between them (tasks/models/cvae.py), so this needs
no torch.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from scipy.special import expit

from fedhet.common.checksums import read_label
from fedhet.common.errors import DamagedFileError

MODEL, CLIENTS = "model.safetensors", "client_models.safetensors"
SAMPLES = 4  # per class
MOST_CLIENTS = 10
_NAME = re.compile(r"(?:(\d+)/model/)?decoder\.(\d+)\.(weight|bias)")  # client, layer, kind

Array = NDArray[np.float64]
Pixels = NDArray[np.uint8]
Layers = Sequence[tuple[Array, Array]]  # weights (out, in) and biases (out,)


@dataclass(frozen=True)
class Generated:
    """Images of each class, from the same latents for every decoder; compressed, in base64."""

    shape: Sequence[int]  # (samples per class, classes, height, width), pixels in 0..255
    model: str  # of the run's final decoder
    clients: Mapping[str, str]  # of the clients' own decoders, by id

    def images(self, packed: str) -> Pixels:
        """Return (samples, classes, height, width) of ``model``, or of one of ``clients``."""
        values = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8)
        return values.reshape(self.shape)


def read_generated(folder: Path, settings: Mapping[str, Any]) -> Generated | None:
    """Return what a run's decoders generate; None without decoders, or for coloured images."""
    if settings.get("task.model") != "cvae" or settings.get("task.channels") != 1:
        return None
    side, classes = int(settings["task.image_size"]), int(settings.get("task.num_classes") or 0)
    final = _decoders(folder / MODEL).get("")
    if final is None or classes < 1:
        return None
    inputs = final[0][0].shape[1]
    latents = np.random.default_rng(0).standard_normal((SAMPLES, inputs - classes))
    clients = sorted(_decoders(folder / CLIENTS).items(), key=lambda pair: int(pair[0]))
    return Generated(
        (SAMPLES, classes, side, side),
        _packed(decode(final, latents, classes)),
        {n: _packed(decode(layers, latents, classes)) for n, layers in clients[:MOST_CLIENTS]},
    )


def decode(layers: Layers, latents: Array, classes: int) -> Array:
    """Return the pixels' probabilities (samples, classes, d) of latents (samples, latent)."""
    count = len(latents)
    labels = np.broadcast_to(np.eye(classes), (count, classes, classes))
    values = np.broadcast_to(latents[:, None], (count, classes, latents.shape[1]))
    values = np.concatenate([values, labels], axis=2)
    for number, (weight, bias) in enumerate(layers):
        values = np.maximum(values, 0.0) if number else values
        values = values @ weight.T + bias
    probabilities: Array = expit(values)
    return probabilities


def _packed(probabilities: Array) -> str:
    pixels = np.round(255 * probabilities).astype(np.uint8)
    return base64.b64encode(zlib.compress(pixels.tobytes(), 9)).decode()


def _decoders(path: Path) -> dict[str, Layers]:
    """Return a file's decoders by client, "" for the run's own; empty without a file."""
    found: dict[str, dict[int, dict[str, Array]]] = {}
    try:
        read_label(path)  # refuses a damaged file
        with safe_open(path, framework="np") as file:
            for key in file.keys():
                if match := _NAME.fullmatch(key):
                    layers = found.setdefault(match[1] or "", {})
                    values = file.get_tensor(key).astype(np.float64)
                    layers.setdefault(int(match[2]), {})[match[3]] = values
    except (OSError, SafetensorError, DamagedFileError):
        return {}
    return {
        owner: [(layers[n]["weight"], layers[n]["bias"]) for n in sorted(layers)]
        for owner, layers in found.items()
        if all({"weight", "bias"} <= set(layer) for layer in layers.values())
    }
