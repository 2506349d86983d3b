"""Tensors travel as they are: their own type, shape and bits, and no byte more than a header."""

from __future__ import annotations

import pytest
import torch
from flwr.app import RecordDict

from strategies.round.records import count_bytes, to_record, to_tensors

TYPES = [torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int64]
TYPES += [torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)], ids=str)
def test_a_tensor_travels_in_its_own_type(dtype, shape):
    tensor = (torch.arange(24)[: torch.Size(shape).numel()].reshape(shape) - 3).to(dtype)
    content = RecordDict({"payload": to_record({"a": tensor})})
    back = to_tensors(content["payload"])["a"]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back, tensor)
    header = count_bytes(content) - tensor.numel() * tensor.element_size()
    assert header == 128
