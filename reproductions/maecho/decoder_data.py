"""What the decoders of a CVAE's run generate (Su et al., MA-Echo, Figure 4).

Read are the final model, and the clients' own where the run has kept them
(checkpoint.client_models). A decoder is a chain of linear layers with ReLU between them
(tasks/models/cvae.py), so that no torch is needed.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

MODEL, CLIENTS = "model.safetensors", "client_models.safetensors"
SAMPLES = 4  # of each class
MOST_CLIENTS = 10
_PREFIX = "decoder."

Array = NDArray[np.float64]
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Generated:
    """Images of each class, from the same latents for every decoder.

    Args:
        shape: (samples of a class, classes, height, width).
        model: of the run's final decoder; pixels in 0..255, compressed, in base64.
        clients: of the clients' own decoders, by number.
    """

    shape: Sequence[int]
    model: str
    clients: Mapping[str, str]

    def images(self, packed: str) -> Pixels:
        """Return (samples, classes, height, width) of ``model``, or one of ``clients``."""
        values = np.frombuffer(zlib.decompress(base64.b64decode(packed)), dtype=np.uint8)
        return values.reshape(self.shape)


def read_generated(folder: Path, settings: Mapping[str, Any]) -> Generated | None:
    """Return what a run's decoders generate; None where there are none, or of coloured images."""
    if settings.get("task.model") != "cvae" or settings.get("task.channels") != 1:
        return None
    side, classes = int(settings["task.image_size"]), int(settings.get("task.num_classes") or 0)
    own = _decoders(folder / MODEL).get("")
    if own is None or classes < 1:
        return None
    latents = np.random.default_rng(0).standard_normal((SAMPLES, _inputs(own) - classes))
    clients = sorted((int(n), d) for n, d in _decoders(folder / CLIENTS).items() if n.isdigit())
    return Generated(
        (SAMPLES, classes, side, side),
        _packed(decode(own, latents, classes)),
        {str(n): _packed(decode(d, latents, classes)) for n, d in clients[:MOST_CLIENTS]},
    )


def decode(layers: Sequence[tuple[Array, Array]], latents: Array, classes: int) -> Array:
    """Return the probabilities of the pixels (samples, classes, d).

    Args:
        layers: weights (out, in) and biases (out,), in their order.
        latents: (samples, latent).
        classes: C; each latent is decoded as every class.
    """
    count = len(latents)
    told = np.broadcast_to(np.eye(classes), (count, classes, classes))
    values = np.broadcast_to(latents[:, None], (count, classes, latents.shape[1]))
    values = np.concatenate([values, told], axis=2)
    for number, (weight, bias) in enumerate(layers):
        values = np.maximum(values, 0.0) if number else values
        values = values @ weight.T + bias
    probabilities: Array = 0.5 * (1.0 + np.tanh(0.5 * values))  # the logistic function
    return probabilities


def _inputs(layers: Sequence[tuple[Array, Array]]) -> int:
    return int(layers[0][0].shape[1])


def _packed(probabilities: Array) -> str:
    pixels = np.round(255 * probabilities).astype(np.uint8)
    return base64.b64encode(zlib.compress(pixels.tobytes(), 9)).decode()


def _decoders(path: Path) -> dict[str, list[tuple[Array, Array]]]:
    """Return a file's decoders by client, "" for the model of the run; empty without a file."""
    found: dict[str, dict[int, dict[str, Array]]] = {}
    try:
        with safe_open(path, framework="np") as file:
            for key in file.keys():
                owner, _, name = key.rpartition("/model/")
                place, _, kind = name.removeprefix(_PREFIX).partition(".")
                if name.startswith(_PREFIX) and place.isdigit() and "/" not in name:
                    values = file.get_tensor(key).astype(np.float64)
                    found.setdefault(owner, {}).setdefault(int(place), {})[kind] = values
    except (OSError, SafetensorError):
        return {}
    return {
        owner: [(layers[n]["weight"], layers[n]["bias"]) for n in sorted(layers)]
        for owner, layers in found.items()
        if all({"weight", "bias"} <= set(layer) for layer in layers.values())
    }
