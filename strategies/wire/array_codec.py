"""Tensors as Flower arrays: the bytes of a .npy file, without numpy's repeated header work.

``numpy.save`` and ``numpy.load`` write and parse a header for every array, which takes longer than
small tensors' data. Here each header is made and parsed once per type and shape.
"""

from __future__ import annotations

import io
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

_LENGTH = slice(8, 10)  # of a version 1.0 file: magic (6), version (2), length of the rest (2)
_STYPE = "numpy.ndarray"
_VERSION_1 = npy.magic(1, 0)
_LONGEST_HEADER = 512  # bytes; ours have 128
_DIMS = 16
_NAMES = ("f2", "f4", "f8", "i8", "i4", "i2", "i1", "u2", "u1", "?")
_TYPES = frozenset(np.dtype(name).str for name in _NAMES)


class TensorArray(Array):
    """A Flower array that shares a tensor's memory, and makes its bytes when they are asked for.

    In one process nobody asks for them, and the tensor keeps its layout; what leaves the process is
    in C order. Between the processes of a machine it is pickled without a further copy. The tensor
    must not be written to any more.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        kind = {"dtype": _name(values.dtype), "shape": tuple(values.shape), "stype": _STYPE}
        self.__dict__.update(kind, values=values)

    @property
    def data(self) -> bytes:  # type: ignore[override]
        """The bytes that travel."""
        return _npy(self.__dict__["values"])

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        values = self.__dict__["values"]
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def __reduce__(self) -> tuple[type[TensorArray], tuple[NDArray[Any]]]:
        """Pickle the numbers, in C order."""
        return TensorArray, (np.asarray(self.__dict__["values"], order="C"),)


def to_array(tensor: Tensor, *, shared: bool = False) -> Array:
    """Return a tensor as a Flower array; ``shared``: see :class:`TensorArray`."""
    values = tensor.detach().cpu().numpy()
    if shared:
        return TensorArray(values)
    return Array(_name(values.dtype), tuple(values.shape), _STYPE, _npy(values))


def bytes_of(array: Array) -> int:
    """Return how many bytes of an array travel."""
    if isinstance(array, TensorArray):
        values = array.__dict__["values"]
        return len(_header(values.dtype, values.shape)) + int(values.nbytes)
    return len(array.data)


def to_tensor(array: Array) -> Tensor:
    """Return a Flower array as a tensor with its own memory, unless the array shares a tensor's.

    This reads only the array's bytes, in the form that ``to_array`` writes, and allocates no more
    than they need. Raises ValueError for everything else.
    """
    if isinstance(array, TensorArray):  # from this machine: none can be received
        return array.tensor
    data = array.data
    if array.stype != _STYPE or data[: len(_VERSION_1)] != _VERSION_1:
        raise ValueError("it is no .npy file of version 1.0")
    start = _LENGTH.stop + int.from_bytes(data[_LENGTH], "little")
    if start > _LONGEST_HEADER:
        raise ValueError(f"its header has {start} bytes, more than {_LONGEST_HEADER}")
    try:
        shape, fortran_order, dtype = _parsed(data[:start])
    except Exception as error:  # numpy evaluates the header: a broken one raises anything
        raise ValueError(f"its header is broken ({type(error).__name__})") from None
    whole = all(type(size) is int and size >= 0 for size in shape)  # numpy takes True for 1
    if dtype.str not in _TYPES or fortran_order or not whole or len(shape) > _DIMS:
        raise ValueError(f"it holds {dtype.str} of shape {shape}, which no tensor here has")
    try:
        values = np.frombuffer(data, dtype, offset=start).reshape(shape)
    except Exception as error:  # what numpy refuses of a shape differs between its releases
        raise ValueError(
            f"its {len(data) - start} bytes have no shape {shape} of {dtype.str} "
            f"({type(error).__name__})"
        ) from None
    return torch.from_numpy(values.copy())  # the bytes are read-only


def _npy(values: NDArray[Any]) -> bytes:
    return b"".join((_header(values.dtype, values.shape), np.asarray(values, order="C").data))


@lru_cache
def _name(dtype: np.dtype) -> str:
    return str(dtype)


def size_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return how many bytes ``to_array`` makes of such a tensor."""
    kind = torch.empty(0, dtype=dtype).numpy().dtype
    return len(_header(kind, shape)) + math.prod(shape) * kind.itemsize


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
