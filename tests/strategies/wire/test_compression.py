"""Codecs: what they send and what comes of it, against closed forms and brute force."""

import math

import pytest
import torch
from numpy.random import SeedSequence

from fedhet.strategies.wire.compression import (
    COUNTS,
    INDICES,
    SCALES,
    VALUES,
    BFloat16,
    Compression,
    Float16,
    Int4,
    Int8,
    RandomK,
    TopK,
)
from tests.refused import refused

SEED = SeedSequence([0, 1, 2])


def drawn(size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def sent(codec, numbers, seed=SEED) -> torch.Tensor:
    """Return C(v); the arrays are those that the codec states beforehand."""
    arrays = codec.encode(numbers, seed)
    stated = {name: (len(array), array.dtype) for name, array in arrays.items()}
    assert stated == codec.arrays(len(numbers))
    return codec.decode(arrays, len(numbers), seed)


@pytest.mark.parametrize(("codec", "levels"), [(Int8(block=4), 127), (Int4(block=4), 7)])
def test_rounding_to_levels_is_unbiased_and_has_the_variance_of_a_coin(codec, levels):
    """With scale 1 the number q + p is q + 1 with probability p, else q: its variance is p (1 - p).

    Hoeffding: the mean of n draws is off by more than t with probability 2 exp(-2 n t^2).
    """
    repeats = 100_000
    wanted = torch.tensor([levels, -1.25, 0.5, -levels + 0.9])
    found = sent(codec, wanted.repeat(repeats)).view(repeats, 4)
    assert torch.equal(found[:, 0], wanted[:1].expand(repeats))  # the maximum is a level
    for column, number in zip(found.T[1:], wanted[1:].tolist(), strict=True):
        low, part = math.floor(number), number - math.floor(number)
        assert set(column.tolist()) == {low, low + 1}
        tail = math.sqrt(math.log(2e12) / (2 * repeats))
        assert abs(float(column.double().mean()) - number) < tail
        assert abs(float((column - number).double().square().mean()) - part * (1 - part)) < tail


@pytest.mark.parametrize(("codec", "levels"), [(Int8(block=5), 127), (Int4(block=5), 7)])
@pytest.mark.parametrize("size", [1, 2, 7, 10])
def test_numbers_on_the_levels_come_back_exactly(codec, levels, size):
    scales = torch.tensor([0.5, 4.0]).repeat_interleave(5)[:size]
    whole = torch.tensor([levels, -levels, 1, 0, -3, -levels, 2, 0, -1, levels])[:size]
    assert torch.equal(sent(codec, scales * whole), scales * whole)
    assert torch.equal(sent(codec, torch.zeros(size)), torch.zeros(size))


@pytest.mark.parametrize("codec", [Int8(block=2**31 - 1), Int4(block=2**31 - 1)])
def test_a_block_longer_than_the_vector_is_as_long_as_the_vector(codec):
    numbers = drawn(300)
    found = sent(codec, numbers)
    assert len(codec.encode(numbers, SEED)[SCALES]) == 1
    assert float((found - numbers).abs().max()) <= float(numbers.abs().max()) / codec.levels
    assert torch.equal(found, sent(type(codec)(block=300), numbers))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 9, 1000, 65_536, 150_001])
def test_top_k_sends_the_largest_and_their_places(size):
    numbers, codec = drawn(size), TopK(share=0.01)
    kept = {1: 1, 9: 1, 1000: 10, 65_536: 655, 150_001: 1500}[size]
    order = sorted(range(size), key=lambda place: -abs(float(numbers[place])))
    expected = torch.zeros(size)
    expected[order[:kept]] = numbers[order[:kept]]
    assert torch.equal(sent(codec, numbers), expected)
    arrays = codec.encode(numbers, SEED)
    assert (COUNTS in arrays) == (size > 65_536)
    assert arrays[INDICES].dtype == torch.uint16


def test_random_k_takes_one_number_of_each_piece_and_is_unbiased_when_scaled():
    """v = (1, ..., 5) in each piece of five: each is taken with probability 1/5, and counts 5."""
    pieces = 20_000
    numbers = torch.arange(1.0, 6.0).repeat(pieces)
    found = sent(RandomK(share=0.2, error_feedback=False), numbers).view(pieces, 5)
    assert torch.equal((found != 0).sum(1), torch.ones(pieces, dtype=torch.int64))
    tail = 25 * math.sqrt(math.log(2e12) / (2 * pieces))  # numbers from 0 to 25
    assert float((found.mean(0) - torch.arange(1.0, 6.0)).abs().max()) < tail
    share = (found != 0).double().mean(0)
    assert float((share - 0.2).abs().max()) < math.sqrt(math.log(2e12) / (2 * pieces))
    kept = sent(RandomK(share=0.2), numbers).view(pieces, 5)
    assert torch.equal(kept, found / 5)
    uneven = sent(RandomK(share=0.4, error_feedback=False), torch.ones(12))  # 5 pieces of 2 and 3
    assert sorted(uneven[uneven != 0].tolist()) == [2, 2, 2, 3, 3]


def test_random_k_draws_anew_for_each_round_client_and_record():
    compression, codec = Compression(up=RandomK(share=0.1), seed=3), RandomK(share=0.1)
    numbers = torch.arange(1.0, 101.0)
    places = ("update", 1, 1), ("update", 2, 1), ("update", 1, 2), ("control", 1, 1)
    found = [tuple(codec.encode(numbers, compression.draws(*p))[VALUES].tolist()) for p in places]
    assert len(set(found)) == 4
    assert found[0] == tuple(codec.encode(numbers, compression.draws(*places[0]))[VALUES].tolist())


def test_casts_are_torchs_and_half_precision_refuses_what_it_cannot_hold():
    numbers = torch.cat([drawn(100), torch.tensor([0.0, 1e-30, 60_000.0])])
    assert torch.equal(sent(Float16(), numbers), numbers.half().float())
    assert torch.equal(sent(BFloat16(), numbers * 1e30), (numbers * 1e30).bfloat16().float())
    with refused("7e+04", "float16", "bfloat16"):
        Float16().encode(torch.tensor([1.0, -70_000.0]), SEED)
    diverged = sent(Float16(), torch.tensor([1.0, -70_000.0, math.nan]))  # not the codec's fault
    assert not diverged[1:].isfinite().any()


@pytest.mark.parametrize("codec", [Float16(), BFloat16(), Int8(), Int4(), TopK(), RandomK()])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_inf_are_sent_as_they_are(codec, value):
    """So the server sees that a client has diverged."""
    numbers = torch.full((300,), value)
    found = sent(codec, numbers)
    assert not found[found != 0].isfinite().any()
