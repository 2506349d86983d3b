"""Compression of messages: casts, 8 and 4 bits rounded at random, a share of the numbers.

A codec C encodes a vector v of d numbers as arrays, and decodes these to C(v).

Float16, BFloat16    casts
Int8, Int4           Alistarh, Grubic, Li, Tomioka, Vojnovic. NeurIPS 2017.
                     https://arxiv.org/abs/1610.02132 (QSGD, with the maximum as the scale)
TopK, RandomK        Stich, Cordonnier, Jaggi. NeurIPS 2018. https://arxiv.org/abs/1809.07599
error feedback       Karimireddy, Rebjock, Stich, Jaggi. ICML 2019. https://arxiv.org/abs/1901.09847

    Int8, Int4       each b numbers share a scale s = max |v_j| / L, L = 127 or 7:
                     C(v)_j = s floor(v_j / s + U), U uniform in [0, 1):  E C(v) = v,
                     E ||C(v) - v||^2 <= b / (4 L^2) ||v||^2
    TopK             the k = max(1, round(share d)) numbers that are largest in size, the rest 0
    RandomK          v in k pieces of equal length (up to one); of each piece one number, the rest 0
    error feedback   C(v + e) is sent, e <- v + e - C(v + e):  sum_t C_t + e = sum_t v_t

RandomK draws from the seed of the run, round and client, so its indices do not travel. With error
feedback it sends the numbers as they are. Without it, C(v) multiplies each by its piece's length,
so E C(v) = v. The paper draws from the whole vector; drawing from pieces changes neither this nor E
||C(v) - v||^2 = (1 - k / d) ||v||^2.  TopK's indices take two bytes, because they count from the
start of their 65,536 numbers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from numpy.random import SeedSequence
from torch import Tensor
from torch.nn.functional import pad

from fedhet.common.configured import Configured, Option, Refers
from fedhet.common.errors import ConfigError
from fedhet.common.kinds import Count, Says, Seed, ShareAboveZero
from fedhet.strategies.base import Tensors

KEY = "strategy/compression"
UP, DOWN = "strategy.compression.up", "strategy.compression.down"
Arrays = Mapping[str, tuple[int, torch.dtype]]  # length and type by name
Down = Literal["none", "float16", "bfloat16", "int8", "int4"]
# No tensor of a model can have such a name: a module's name is not empty.
VALUES, SCALES, INDICES, COUNTS = ".values", ".scales", ".indices", ".counts"
SERVER = 0  # sender; client i is i + 1
_STREAM = 0xC0  # keeps draws independent of every other use of the run's seed
_SPAN = 1 << 16  # numbers that an index of two bytes reaches


class Codec(Configured):
    """Encodes float vectors of d numbers, and decodes them."""

    section = UP

    @property
    def error_feedback(self) -> bool:
        """Whether the client adds what C leaves out of an update to its next update."""
        return False

    @property
    def contracts(self) -> bool:
        """Whether E ||C(v) - v|| < ||v||, which error feedback needs."""
        return True

    def arrays(self, size: int) -> Arrays:
        """Return the length and type of each array that stands for ``size`` > 0 numbers."""
        raise NotImplementedError

    def encode(self, numbers: Tensor, seed: SeedSequence) -> dict[str, Tensor]:
        """Return the arrays of a vector in host memory."""
        raise NotImplementedError

    def decode(self, arrays: Tensors, size: int, seed: SeedSequence) -> Tensor:
        """Return C(v), ``size`` numbers in float32, from arrays as :meth:`arrays` says.

        Raises:
            ValueError: if no vector has these arrays; NaN and Inf are decoded.
        """
        raise NotImplementedError


class Float16(Codec):
    """Half precision, 2 bytes a number: too coarse below 6e-8, refused above 65504."""

    dtype: ClassVar[torch.dtype] = torch.float16
    wire: ClassVar[torch.dtype] = torch.float16

    def arrays(self, size: int) -> Arrays:
        """Return one array."""
        return {VALUES: (size, self.wire)}

    def encode(self, numbers: Tensor, seed: SeedSequence) -> dict[str, Tensor]:
        """Cast; a finite number that becomes Inf is a ConfigError. NaN and Inf are sent as such."""
        cast = numbers.to(self.dtype)
        if not bool(cast.isfinite().all()) and bool(numbers.isfinite().all()):
            largest = torch.finfo(self.dtype).max
            raise ConfigError(
                f"{numbers.abs().max():.3g} is too large for {type(self).__name__.lower()}, which "
                f"ends at {largest:.3g}: set {KEY} (or {DOWN}) to bfloat16, int8 or none"
            )
        return {VALUES: cast.view(self.wire)}

    def decode(self, arrays: Tensors, size: int, seed: SeedSequence) -> Tensor:
        """Cast back."""
        return arrays[VALUES].view(self.dtype).float()


class BFloat16(Float16):
    """The first half of a float32: 2 bytes a number, with its range and 8 bits of precision."""

    dtype = torch.bfloat16
    wire = torch.int16  # its bits: NumPy does not know the type


class Int8(Codec):
    """8 bits a number, rounded at random so that the mean is right (QSGD, Alistarh et al. 2017):
    1.03 bytes a number with the default block.
    """

    block: Count = 128
    """how many numbers share a scale of 4 bytes"""
    error_feedback: bool = False
    """true: the client keeps the rounding error of an update and adds it to its next update"""
    levels: ClassVar[int] = 127

    def arrays(self, size: int) -> Arrays:
        """Return the numbers' array and the scales'."""
        return {VALUES: (size, torch.int8), SCALES: (-(-size // self.block), torch.float32)}

    def encode(self, numbers: Tensor, seed: SeedSequence) -> dict[str, Tensor]:
        """Round to the levels; NaN and Inf are then in the scales."""
        block = self._block(len(numbers))
        blocks = pad(numbers.float(), (0, -len(numbers) % block)).view(-1, block)
        scales = blocks.abs().amax(1, keepdim=True) / self.levels
        exact = (blocks / scales.where(scales > 0, 1.0)).clamp(-self.levels, self.levels)
        low = exact.floor()
        draws = torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
        rounded = low + (torch.rand(exact.shape, generator=draws) < exact - low)
        whole = rounded.nan_to_num().to(torch.int8).view(-1)[: len(numbers)]
        return {VALUES: self.pack(whole), SCALES: scales.view(-1)}

    def decode(self, arrays: Tensors, size: int, seed: SeedSequence) -> Tensor:
        """Multiply by the scales."""
        if (arrays[SCALES] < 0).any():
            raise ValueError("holds a scale below 0")
        whole = self.unpack(arrays[VALUES], size)
        if (whole < -self.levels).any():
            raise ValueError(f"holds a level below {-self.levels}")
        return whole * arrays[SCALES].repeat_interleave(self._block(size))[:size]

    def _block(self, size: int) -> int:
        """Return the block's length: a longer one would only pad the vector."""
        return min(self.block, size)

    def pack(self, whole: Tensor) -> Tensor:
        """Return the bytes of int8 numbers from -levels to levels."""
        return whole

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        """Return the int8 numbers; one beyond ``size`` that is not 0 is a ValueError."""
        return packed


class Int4(Int8):
    """4 bits a number, two numbers in a byte, rounded at random so that the mean is right: 0.53
    bytes a number with the default block.
    """

    levels: ClassVar[int] = 7

    def arrays(self, size: int) -> Arrays:
        """Return the numbers' array and the scales'."""
        return {**super().arrays(size), VALUES: (-(-size // 2), torch.uint8)}

    def pack(self, whole: Tensor) -> Tensor:
        """Put two numbers plus 8 into each byte, the first into its lower half."""
        pairs = (pad(whole, (0, len(whole) % 2)) + 8).to(torch.uint8).view(-1, 2)
        return pairs[:, 0] | pairs[:, 1] << 4

    def unpack(self, packed: Tensor, size: int) -> Tensor:
        """Take them apart."""
        whole = torch.stack([packed & 15, packed >> 4], 1).view(-1).to(torch.int8) - 8
        if (whole[size:] != 0).any():
            raise ValueError("holds a number too many")
        return whole[:size]


class _Share(Codec):
    """Sends a share of the numbers."""

    share: ShareAboveZero = 0.01
    """share of the numbers that is sent"""

    def count(self, size: int) -> int:
        """Return how many of ``size`` numbers are sent, at least one."""
        return max(1, round(self.share * size))


class TopK(_Share):
    """The numbers that are largest in size, in float32 and with their indices (Stich et al. 2018):
    6 bytes for each number sent.
    """

    error_feedback: bool = True
    """true: the client keeps the other numbers and adds them to its next update; false: they are
    lost"""

    def arrays(self, size: int) -> Arrays:
        """Return numbers and indices, and how many are in each 65,536 if there are more."""
        count = self.count(size)
        found = {VALUES: (count, torch.float32), INDICES: (count, torch.uint16)}
        return found if size <= _SPAN else {**found, COUNTS: (-(-size // _SPAN), torch.int32)}

    def encode(self, numbers: Tensor, seed: SeedSequence) -> dict[str, Tensor]:
        """Choose them; indices rise."""
        size = len(numbers)
        chosen = numbers.abs().topk(self.count(size), sorted=False).indices.sort().values
        counts = torch.bincount(chosen // _SPAN, minlength=-(-size // _SPAN)).int()
        indices = (chosen % _SPAN).to(torch.uint16)
        found = {VALUES: numbers[chosen].float(), INDICES: indices, COUNTS: counts}
        return {name: found[name] for name in self.arrays(size)}

    def decode(self, arrays: Tensors, size: int, seed: SeedSequence) -> Tensor:
        """Put them into zeros."""
        indices = arrays[INDICES].long()
        if COUNTS in arrays:
            counts = arrays[COUNTS].long()
            if (counts < 0).any() or int(counts.sum()) != len(indices):
                raise ValueError(f"counts {int(counts.sum())} indices, and has {len(indices)}")
            indices += _SPAN * torch.arange(len(counts)).repeat_interleave(counts)
        if (indices.diff() <= 0).any() or int(indices[-1]) >= size:
            raise ValueError(f"has indices that do not rise from 0 to {size - 1} at most")
        return torch.zeros(size).index_copy_(0, indices, arrays[VALUES])


class RandomK(_Share):
    """Numbers drawn at random, in float32 (Stich et al. 2018): 4 bytes for each number sent."""

    error_feedback: bool = True
    """true: the client keeps the other numbers and adds them to its next update; false: it scales
    the sent numbers by 1 / share instead, so that the mean is right"""

    @property
    def contracts(self) -> bool:
        """Whether the numbers are sent as they are."""
        return self.error_feedback

    def arrays(self, size: int) -> Arrays:
        """Return one array."""
        return {VALUES: (self.count(size), torch.float32)}

    def encode(self, numbers: Tensor, seed: SeedSequence) -> dict[str, Tensor]:
        """Take one number of each piece."""
        indices, _ = self._drawn(len(numbers), seed)
        return {VALUES: numbers[indices].float()}

    def decode(self, arrays: Tensors, size: int, seed: SeedSequence) -> Tensor:
        """Put them into zeros, times the pieces' lengths if they are to be scaled."""
        indices, lengths = self._drawn(size, seed)
        values = arrays[VALUES] if self.error_feedback else arrays[VALUES] * lengths
        return torch.zeros(size).index_copy_(0, indices, values)

    def _drawn(self, size: int, seed: SeedSequence) -> tuple[Tensor, Tensor]:
        """Return the indices, which rise, and the lengths of their pieces.

        They are SeedSequence's own numbers: NumPy pins these to a published reference, while a
        Generator's may differ between the releases that server and client have.
        """
        count = self.count(size)
        starts = np.arange(count + 1, dtype=np.uint64) * np.uint64(size) // np.uint64(count)
        lengths = np.diff(starts)
        indices = starts[:-1] + seed.generate_state(count, np.uint64) % lengths
        return torch.from_numpy(indices.astype(np.int64)), torch.from_numpy(lengths.astype("f4"))


_DOWN: Mapping[str, Codec | None] = {
    "none": None,
    "float16": Float16(),
    "bfloat16": BFloat16(),
    "int8": Int8(),
    "int4": Int4(),
}


class Compression(Option):
    """What travels compressed: the update and a method's ``compressible`` payloads.

    Down, all clients of a round get the same C(x), and train from it: their update is y_i - C(x).
    The server keeps x in full and adds the aggregate to it. Buffers travel in full.

    Sparsifiers are not offered downlink: clients need the whole model.
    """

    group = "strategy/compression"
    variants = MappingProxyType(
        {
            "none": {},
            "float16": {"up": Float16()},
            "bfloat16": {"up": BFloat16()},
            "int8": {"up": Int8()},
            "int4": {"up": Int4()},
            "top_k": {"up": TopK()},
            "random_k": {"up": RandomK()},
        }
    )

    up: Annotated[Codec | None, Says("a codec (_target_) or null")] = None
    """codec of what clients send; null: float32"""
    down: Down = "none"
    """what clients receive: the model and a method's vectors"""
    seed: Annotated[Seed, Refers("${seed}")] = 0
    """seed of the run"""

    @property
    def codec_down(self) -> Codec | None:
        """The codec of what clients receive."""
        return _DOWN[self.down]

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """The codecs up and down that are set."""
        return tuple(codec for codec in (self.up, self.codec_down) if codec is not None)

    @property
    def keeps_state(self) -> bool:
        """Whether every client keeps what is left out of its updates."""
        return self.up is not None and self.up.error_feedback

    def draws(self, record: str, round: int, sender: int) -> SeedSequence:
        """Return the seed of one record of a sender: SERVER, or the client's id plus 1."""
        name = zlib.crc32(record.encode())
        return SeedSequence([self.seed, round, sender, name, _STREAM])
