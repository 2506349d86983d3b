"""Sums whose bits do not depend on their order: against math.fsum, and at the edge of int64."""

import copy
import math
import pickle
import random

import pytest
import torch
from torch import Tensor

from fedhet.strategies.round import exact_sum
from fedhet.strategies.round.exact_sum import (
    COARSE,
    FINE,
    MOST_SUMMANDS,
    ExactSum,
    largest_summand,
    norms_of,
)

BLOCK = 1 << 16  # tensors from this size on are added one by one, smaller ones as one
SHAPES = {
    "large": (2, BLOCK // 2 + 5),  # more than a block
    "scalar": (),
    "empty": (0, 3),
    "matrix": (3, 4),
    "a block": (BLOCK,),
    "nearly": (BLOCK - 1,),
    "convolution": (4, 3, 5, 2),
    "end": (7,),
}
CLIENTS = 12


def summands(dtype: torch.dtype, shapes=SHAPES, clients=CLIENTS, high=6.0):
    """Return (tensors, weight) of each client: of both signs and sizes from 1e-8 to 10^high."""
    generator = torch.Generator().manual_seed(3)

    def draw(shape) -> Tensor:
        exponent = torch.rand(shape, generator=generator, dtype=torch.float64) * (high + 8.0) - 8.0
        sign = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1.0
        return (sign * 10.0**exponent).to(dtype)

    weights = torch.randint(1, 60_001, (clients,), generator=generator).tolist()
    weights[0], weights[1] = 60_000, 1
    return [({name: draw(s) for name, s in shapes.items()}, float(w)) for w in weights]


def total_of(parts, unit: float = FINE) -> ExactSum:
    total = ExactSum(unit)
    for tensors, weight in parts:
        total.add(tensors, weight)
    return total


def exact(parts, name: str, chosen: Tensor, divisor: float) -> list[float]:
    """Return fsum(w_i v_i) / divisor of some numbers."""
    products = [tensors[name].reshape(-1)[chosen].double() * weight for tensors, weight in parts]
    return [math.fsum(column) / divisor for column in torch.stack(products).T.tolist()]


def some_of(tensor: Tensor) -> Tensor:
    """Return at most 2,000 places, with the first, the last and those round a block's end."""
    size = tensor.numel()
    places = {*range(min(size, 1000)), *range(max(size - 500, 0), size)}
    places |= {place for place in range(BLOCK - 250, BLOCK + 250) if place < size}
    return torch.tensor(sorted(places), dtype=torch.int64)


def bits(tensors: dict[str, Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("most", [2.0**62, 2.0**52])  # with room for all, and for two or three
@pytest.mark.parametrize(
    ("dtype", "unit", "high"),
    [
        (torch.float32, FINE, 6.0),
        (torch.float64, FINE, 6.0),
        (torch.float32, COARSE, 6.0),
        (torch.float32, COARSE, -3.0),  # 60,000 of them need no second number
        (torch.float32, COARSE, -2.9),  # and of these, some do
    ],
)
def test_any_order_and_any_parts_give_the_same_bits(dtype, unit, high, most, monkeypatch):
    parts, shuffle = summands(dtype, high=high), random.Random(5)
    weights = sum(weight for _, weight in parts)
    expected = bits(total_of(parts, unit).over(weights))
    monkeypatch.setattr(exact_sum, "_MOST", most)
    assert expected.keys() == SHAPES.keys()
    for _ in range(10):
        shuffle.shuffle(parts)
        assert bits(total_of(parts, unit).over(weights)) == expected
        cuts = sorted(shuffle.randint(0, CLIENTS) for _ in range(3))  # a part may be empty
        ends = zip([0, *cuts], [*cuts, CLIENTS], strict=True)
        partial = [total_of(parts[start:end], unit) for start, end in ends]
        shuffle.shuffle(partial)
        merged = ExactSum(unit)
        for part in partial:
            merged.merge(part)
        assert bits(merged.over(weights)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("divisor", [1.0, 123_457.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_those_of_fsum_to_the_last_bit(dtype, divisor):
    """Of products of float32 numbers from 1e-8 on, nothing is rounded but the end."""
    high = 6.0 if dtype == torch.float32 else -1.0  # float16 ends at 65,504
    parts = summands(dtype, high=high)
    found = total_of(parts).over(divisor)
    for name, shape in SHAPES.items():
        assert found[name].shape == shape
        assert found[name].dtype == dtype
        chosen = some_of(found[name])
        expected = torch.tensor(exact(parts, name, chosen, divisor), dtype=torch.float64)
        assert torch.equal(found[name].reshape(-1)[chosen], expected.to(dtype)), name


@pytest.mark.parametrize(
    ("dtype", "unit", "rounded"),
    [
        (torch.float64, FINE, FINE),
        (torch.float64, COARSE, FINE),
        (torch.float32, COARSE, COARSE),
    ],
)
def test_sums_are_those_of_fsum_to_the_resolution(dtype, unit, rounded):
    """Each summand is rounded to it, the sum once or twice to double precision and to its type."""
    parts = summands(dtype)
    found = total_of(parts, unit).over(1.0)
    for name in SHAPES:
        chosen = some_of(found[name])
        expected = exact(parts, name, chosen, 1.0)
        for one, other in zip(found[name].reshape(-1)[chosen].tolist(), expected, strict=True):
            error = CLIENTS * rounded / 2 + 2 * math.ulp(other)
            assert abs(one - other) <= error + abs(other) * torch.finfo(dtype).eps / 2


def test_types_may_be_mixed():
    """As a model with some layers in half precision has them."""
    mixed = {"w": torch.float32, "h": torch.float16, "b": torch.bfloat16, "d": torch.float64}
    drawn = {kind: summands(kind, {"x": (9,)}, high=-1.0) for kind in mixed.values()}
    weights = [weight for _, weight in drawn[torch.float32]]
    tensors = [{n: drawn[kind][i][0]["x"] for n, kind in mixed.items()} for i in range(CLIENTS)]
    parts = list(zip(tensors, weights, strict=True))
    found = total_of(parts).over(7.0)
    for name, kind in mixed.items():
        doubles = [({name: own[name].double()}, weight) for own, weight in parts]
        expected = torch.tensor(exact(doubles, name, torch.arange(9), 7.0), dtype=torch.float64)
        assert found[name].dtype == kind
        near = {"rtol": 1e-12, "atol": 1e-15} if kind == torch.float64 else {}
        torch.testing.assert_close(found[name], expected.to(kind), **near)


@pytest.mark.parametrize("weight", [1.0, 60_000.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_most_summands_of_the_largest_size_do_not_overflow(weight, sign):
    """2^18 of the bound's size, as 18 doublings: their sum is known without adding."""
    largest = largest_summand(weight * MOST_SUMMANDS)
    for dtype in (torch.float32, torch.float64):
        value = torch.tensor([sign * largest, -sign * largest], dtype=dtype)
        total = total_of([({"w": value}, weight)])
        for _ in range(18):
            total.merge(copy.deepcopy(total))
        mean = total.over(weight * MOST_SUMMANDS)["w"]
        torch.testing.assert_close(mean, value, rtol=2e-7, atol=0.0)


# 2^57 times the first is a multiple of 2^40 and far from one of 2^51; the second is one number.
@pytest.mark.parametrize("size", [2.0**28 - 2.0**-17, 2.0**-7 - 2.0**-40])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_most_summands_with_the_largest_low_parts_do_not_overflow(sign, size):
    assert size < largest_summand(MOST_SUMMANDS)
    total = total_of([({"w": torch.tensor([sign * size], dtype=torch.float64)}, 1.0)])
    for _ in range(18):
        total.merge(copy.deepcopy(total))
    assert total.over(1.0)["w"].item() == sign * size * 2.0**18


@pytest.mark.parametrize("unit", [FINE, COARSE])
def test_numbers_of_every_size_are_added(unit):
    """One size at a time: in a block with larger ones all are split into two numbers."""
    for exponent in range(-20, 40):
        value = torch.tensor([1.125, -1.5], dtype=torch.float32) * 2.0**exponent
        total = total_of([({"w": value}, 1.0), ({"w": value}, 2.0)], unit)
        assert torch.equal(total.over(3.0)["w"], value), exponent


def test_the_bound_of_one_client_is_that_of_weight_one():
    assert largest_summand(0.5) == largest_summand(1.0) == 2.0**46
    assert largest_summand(60_000.0 * 1000) == pytest.approx(2.0**46 / 6e7)


def test_nothing_is_a_sum_too():
    """A method without shared tensors, and a part without clients."""
    bare = total_of([({}, 3.0), ({}, 4.0)])
    assert bare.over(7.0) == {}
    empty = total_of([({"e": torch.empty(0, 2)}, 1.0)] * 2).over(2.0)
    assert empty["e"].shape == (0, 2)


# ---- norms ---------------------------------------------------------------------------------------


@pytest.fixture
def threads():
    """Set the number of threads, and put it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_are_those_of_double_precision_on_any_number_of_threads(dtype, threads):
    generator = torch.Generator().manual_seed(4)
    sizes = {**SHAPES, "many": (700_001,), "no block more": (1 << 17,)}
    tensors = {
        name: (10.0 ** (6 * place / len(sizes) - 3)) * torch.randn(shape, generator=generator)
        for place, (name, shape) in enumerate(sizes.items())
    }
    tensors = {name: value.to(dtype) for name, value in tensors.items()}
    found = []
    for number in (1, 2, 3):
        threads(number)
        found.append(norms_of(tensors))
    assert found[0] == found[1] == found[2]
    expected = {name: float(value.double().norm()) for name, value in tensors.items()}
    assert found[0] == pytest.approx(expected, rel=1e-6, abs=0.0)
    assert found[0]["empty"] == 0.0
    assert norms_of({}) == {}
    for unit in (COARSE, FINE):
        norms = ExactSum(unit).add(tensors, 3.0)
        assert norms == {**found[0], "convolution": norms["convolution"]}  # in another order
        assert norms == pytest.approx(found[0], rel=1e-6, abs=0.0)


def test_a_convolution_gives_the_same_bits_in_both_layouts_and_a_mean_in_c_order():
    generator = torch.Generator().manual_seed(5)
    tensors = {"w": torch.randn(64, 512, 3, 3, generator=generator), "b": torch.ones(64)}
    laid_out = {**tensors, "w": tensors["w"].to(memory_format=torch.channels_last)}
    one, other = ExactSum(COARSE), ExactSum(COARSE)
    assert one.add(tensors, 3.0) == other.add(laid_out, 3.0)
    other.add(tensors, 2.0)
    one.add(laid_out, 2.0)
    mean = one.over(5.0)
    assert bits(mean) == bits(other.over(5.0)) == bits(tensors)
    assert mean["w"].is_contiguous()


def test_norms_of_half_precision_are_not_computed_in_it():
    """A float16 sum of squares ends at 65,504, and bfloat16 has three digits."""
    for dtype in (torch.float16, torch.bfloat16):
        value = torch.full((40_000,), 500.0, dtype=dtype)
        assert norms_of({"w": value}) == pytest.approx({"w": 500.0 * 200.0}, rel=1e-6)


def test_a_sum_that_has_travelled_can_be_added_to_even_if_its_arrays_are_read_only():
    tensors = {"w": torch.randn(70_000, generator=torch.Generator().manual_seed(1))}
    total, buffers = ExactSum(), []
    total.add(tensors, 2.0)
    data = pickle.dumps(total, protocol=5, buffer_callback=buffers.append)
    shown = [memoryview(buffer.raw()).toreadonly() for buffer in buffers]
    back = pickle.loads(data, buffers=shown)
    back.merge(total)
    assert torch.equal(back.over(4.0)["w"], tensors["w"])
    assert torch.equal(total.over(2.0)["w"], tensors["w"])
