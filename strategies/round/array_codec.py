"""Tensors as Flower arrays: the bytes of a .npy file, without numpy's repeated header work.

``numpy.save`` and ``numpy.load`` write and parse a header for every array, which takes longer than
small tensors' data. Here each header is made and parsed once per type and shape.
"""

from __future__ import annotations

import io
import math
from functools import lru_cache

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from torch import Tensor

_LENGTH = slice(8, 10)  # of a version 1.0 file: magic (6), version (2), length of the rest (2)
_STYPE = "numpy.ndarray"


def to_array(tensor: Tensor) -> Array:
    """Return a tensor as a Flower array, in C order."""
    values = np.ascontiguousarray(tensor.detach().cpu().numpy()).reshape(tensor.shape)
    data = b"".join((_header(values.dtype, values.shape), values.data))
    return Array(str(values.dtype), tuple(values.shape), _STYPE, data)


def to_tensor(array: Array) -> Tensor:
    """Return a Flower array as a tensor of its own.

    Raises ValueError for pickled objects and broken files, TypeError for another serialisation.
    """
    data = array.data
    version_1 = npy.magic(1, 0)
    if array.stype != _STYPE or data[: len(version_1)] != version_1:
        return torch.from_numpy(array.numpy().copy())
    start = _LENGTH.stop + int.from_bytes(data[_LENGTH], "little")
    shape, fortran_order, dtype = _parsed(data[:start])
    if dtype.hasobject or fortran_order or len(data) != start + math.prod(shape) * dtype.itemsize:
        return torch.from_numpy(array.numpy().copy())  # numpy reads it or raises
    values = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return torch.from_numpy(values.copy())  # the bytes are read-only


@lru_cache(maxsize=4096)
def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    buffer = io.BytesIO()
    described = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(buffer, described)
    return buffer.getvalue()


@lru_cache(maxsize=4096)
def _parsed(header: bytes) -> tuple[tuple[int, ...], bool, np.dtype]:
    buffer = io.BytesIO(header)
    npy.read_magic(buffer)
    shape, fortran_order, dtype = npy.read_array_header_1_0(buffer)
    return shape, fortran_order, dtype
