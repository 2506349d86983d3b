"""How many bytes a client's training moves, known before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord

from fedhet.strategies.base import ClientSide, Payloads, Shapes
from fedhet.strategies.wire.array_codec import bytes_of, size_of
from fedhet.strategies.wire.compressed_records import Downlink
from fedhet.strategies.wire.compression import Codec
from fedhet.strategies.wire.records import known_shapes


@dataclass(frozen=True)
class MessageSizes:
    """The array bytes of a train message and of its reply, as ``count_bytes`` would count them.

    Attributes:
        downlink: what is compressed, and with which codecs.
        client_sides: the methods' client halves; payloads of unknown shapes count nothing.
        untrained: tensors that do not come up.
    """

    downlink: Downlink
    client_sides: Mapping[str, ClientSide]
    untrained: Collection[str] = ()

    def of(self, arrays: ArrayRecord, payloads: Payloads, expected: Shapes) -> int:
        """Return the bytes down and up.

        Args:
            arrays: x and its buffers.
            payloads: that go down.
            expected: the shapes of payloads that come up.
        """
        compression, compressed = self.downlink.compression, self.downlink.payloads
        trained = [name for name in arrays if name not in self.downlink.buffers]
        moved = [name for name in trained if name not in self.untrained]
        total = 2 * sum(bytes_of(arrays[name]) for name in arrays if name in self.downlink.buffers)
        for codec, names in ((compression.codec_down, trained), (compression.up, moved)):
            sizes = [(tuple(arrays[n].shape), getattr(torch, arrays[n].dtype)) for n in names]
            total += _record(sizes, codec)
        for name, tensors in payloads.items():
            sizes = [(tuple(value.shape), value.dtype) for value in tensors.values()]
            total += _record(sizes, compression.codec_down if name in compressed else None)
        sides = self.client_sides.values()
        dtypes = {name: kind for side in sides for name, kind in side.dtypes.items()}
        sent = {name for side in sides for name in side.sends}
        for name, shapes in known_shapes(expected).items():
            if name in sent:
                sizes = [
                    (shape, dtypes.get(name) or _dtype_of(tensor, arrays))
                    for tensor, shape in shapes.items()
                ]
                total += _record(sizes, compression.up if name in compressed else None)
        return total


def _dtype_of(tensor: str, arrays: ArrayRecord) -> torch.dtype:
    """Return the model's own type for what has a parameter's name, else float32."""
    return getattr(torch, arrays[tensor].dtype) if tensor in arrays else torch.float32


def _record(sizes: list[tuple[tuple[int, ...], torch.dtype]], codec: Codec | None) -> int:
    if codec is None:
        return sum(size_of(dtype, shape) for shape, dtype in sizes)
    return _coded(codec, sum(math.prod(shape) for shape, _ in sizes))


def _coded(codec: Codec, length: int) -> int:
    arrays = codec.arrays(length) if length else {}
    return sum(size_of(dtype, (size,)) for size, dtype in arrays.values())
