"""The generator against the known answers of Random123, and the limits and statistics of the distributions."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cgcompile.transforms.rng.distributions import (  # fmt: skip
    Stream,
    axes_in_memory,
    bits63,
    exponential01,
    integers,
    normal01,
    positive01,
    uniform01,
)
from cgcompile.transforms.rng.operators import LEAVES
from cgcompile.transforms.rng.philox import BUMPS, MASK, MULTIPLIERS, ROUNDS, Words, block, schedule

COUNT = 1 << 16

words = st.integers(0, MASK)


def signed(number: int) -> int:
    """Converts a number below 2^64 to the int64 with the same bits."""
    return number - (1 << 64) if number >> 63 else number


def drawn(element: Tensor, number: int = 0, seed: int = 0, calls: int = 0) -> Words:
    return block(element, schedule(torch.tensor([signed(seed), signed(calls)])), number)


def reference(counter: list[int], key: list[int]) -> list[int]:
    """Computes the generator as in the paper, with Python integers."""
    for turn in range(ROUNDS):
        left, right = [(word + turn * bump) & MASK for word, bump in zip(key, BUMPS, strict=True)]
        a, b = counter[0] * MULTIPLIERS[0], counter[2] * MULTIPLIERS[1]
        counter = [(b >> 32) ^ counter[1] ^ left, b & MASK, (a >> 32) ^ counter[3] ^ right, a & MASK]
    return counter


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_random123(counter: str, key: str, expected: str) -> None:
    element, number, *calls = [int(word, 16) for word in counter.split()]
    low, high = [int(word, 16) for word in key.split()]
    drawn_words = drawn(torch.tensor([element]), number, low + (high << 32), calls[0] + (calls[1] << 32))
    assert [f"{int(word):08x}" for word in drawn_words] == expected.split()


@given(words, words, words, words, words, words)
def test_any_counter_and_key_as_in_the_paper(element: int, number: int, low: int, high: int, left: int, right: int) -> None:
    drawn_words = drawn(torch.tensor([element]), number, left + (right << 32), low + (high << 32))
    assert [int(word) for word in drawn_words] == reference([element, number, low, high], [left, right])


# --- numbers at the ends of their range ---------------------------------------------------------------------------


def same(word: int) -> Words:
    return (torch.tensor([word]),) * 4


@pytest.mark.parametrize(
    ("dtype", "digits"), [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)], ids=str
)
def test_a_uniform_number_has_the_digits_of_its_dtype_and_is_never_1(dtype: torch.dtype, digits: int) -> None:
    """The values are multiples of 2^-digits in [0, 1), as in at::transformation::uniform_real."""
    assert uniform01(same(0), dtype).item() == 0
    assert uniform01(same(MASK), dtype).item() == 1 - 2.0**-digits
    assert uniform01(same(1 << 31), dtype).dtype == dtype
    numbers = uniform01(drawn(torch.arange(COUNT)), dtype).double()
    assert torch.equal((numbers * 2.0**digits).frac(), torch.zeros(COUNT, dtype=torch.float64))
    assert (numbers * 2.0**digits % 2).mean() == pytest.approx(0.5, abs=0.01), "the last digit is used"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_word_gives_infinity_or_a_waiting_time_of_zero(dtype: torch.dtype) -> None:
    for word in (0, 1, 1 << 31, MASK - 1, MASK):
        assert 0 < positive01(same(word), dtype).item() <= 1
        assert 0 < exponential01(same(word), dtype).item() < math.inf
        for other in (0, 1 << 31, MASK):
            number = normal01((*same(word)[:2], *same(other)[:2]), dtype).item()
            assert abs(number) < (6.7 if dtype == torch.float32 else 8.6)


@given(words, words, st.integers(1, (1 << 63) - 1) | st.integers(1, 1 << 32))
def test_integers_lie_in_their_range(low: int, high: int, span: int) -> None:
    """Up to a range of 2^31, an integer is 64 random bits times the range, divided by 2^64; above, 63 bits modulo the range.
    Neither overflows."""
    integer = integers((torch.tensor(low), torch.tensor(high), *same(0)[:2]), span).item()
    drawn64 = low | high << 32
    assert integer == ((drawn64 * span) >> 64 if span <= 1 << 31 else (drawn64 & ((1 << 63) - 1)) % span)


def stream() -> Stream:
    return Stream(shared=schedule(torch.tensor([3, 0])), numbers=itertools.count())


@pytest.mark.parametrize(
    ("low", "high"), [(-(1 << 63), (1 << 63) - 1), (-(1 << 62), 1 << 62), (-5, (1 << 63) - 1), (-(1 << 63), 1)]
)
def test_ranges_of_more_than_63_bits(low: int, high: int) -> None:
    """Any range of int64 is accepted, as by torch.randint."""
    numbers = LEAVES[torch.ops.aten.randint.low](stream(), low, high, [COUNT])
    assert low <= int(numbers.min()) and int(numbers.max()) < high
    assert numbers.double().mean().item() == pytest.approx((low + high) / 2, abs=(high - low) * 0.005)


def test_a_shuffle_holds_every_number_once() -> None:
    shuffle = LEAVES[torch.ops.aten.randperm.default](stream(), 1000)
    assert torch.equal(shuffle.sort().values, torch.arange(1000)) and not torch.equal(shuffle, torch.arange(1000))
    places = torch.stack([LEAVES[torch.ops.aten.randperm.default](source, 5) for source in [stream()] for _ in range(4000)])
    assert (places == 0).double().mean(0).tolist() == pytest.approx([0.2] * 5, abs=0.03)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)], ids=str)
def test_numbers_lie_in_memory_as_the_tensor_that_they_are_for(order: tuple[int, ...]) -> None:
    """The strides are kept, as by torch.rand_like."""
    like = torch.empty(24).view(2, 3, 4).permute(order)
    numbers = LEAVES[torch.ops.aten.rand_like.default](stream(), like)
    assert (numbers.shape, numbers.stride(), axes_in_memory(numbers)) == (like.shape, like.stride(), axes_in_memory(like))
    flat = LEAVES[torch.ops.aten.rand.default](stream(), [24])
    assert torch.equal(numbers.permute([order.index(axis) for axis in range(3)]).reshape(-1), flat)


# --- statistics ---------------------------------------------------------------------------------------------------


def correlation(left: Tensor, right: Tensor) -> float:
    """Returns the correlation in standard deviations for independent numbers."""
    return float(torch.corrcoef(torch.stack([left, right]))[0, 1]) * math.sqrt(len(left))


def uniform(**options: int) -> Tensor:
    return uniform01(drawn(torch.arange(COUNT), **options), torch.float64)


@pytest.mark.parametrize("seed", [0, 1, -1 & (1 << 64) - 1, 1 << 40])
def test_uniform_numbers_are_uniform(seed: int) -> None:
    """Mean 1/2, variance 1/12, and a Kolmogorov-Smirnov distance below that of one sample in a thousand."""
    numbers = uniform(seed=seed)
    assert numbers.mean().item() == pytest.approx(1 / 2, abs=4 * math.sqrt(1 / 12 / COUNT))
    assert numbers.var().item() == pytest.approx(1 / 12, abs=4 * math.sqrt(1 / 180 / COUNT))
    steps = torch.arange(COUNT + 1, dtype=torch.float64) / COUNT
    ordered = numbers.sort().values
    assert max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) < 1.95 / math.sqrt(COUNT)


def test_every_bit_of_every_word_is_as_often_0_as_1() -> None:
    for word in drawn(torch.arange(COUNT), seed=7):
        for bit in range(32):
            assert (word >> bit & 1).double().mean().item() == pytest.approx(0.5, abs=4.5 * 0.5 / math.sqrt(COUNT))


def test_elements_words_draws_calls_and_seeds_are_independent() -> None:
    first = uniform()
    others = {
        "the next element": first.roll(1),
        "the next draw": uniform(number=1),
        "the next call": uniform(calls=1),
        "the call after 2^32": uniform(calls=1 << 32),
        "the next seed": uniform(seed=1),
        "another high word of the seed": uniform(seed=1 << 32),
        "the other words": uniform01(drawn(torch.arange(COUNT))[2:], torch.float64),
    }
    for name, other in others.items():
        assert abs(correlation(first, other)) < 4, name
        assert abs(correlation((first - 0.5) ** 2, (other - 0.5) ** 2)) < 4, name
        assert not (first == other).any(), name


@settings(max_examples=20)
@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_two_seeds_give_other_numbers(left: int, right: int) -> None:
    elements = torch.arange(64)
    alike = torch.stack(drawn(elements, seed=left)) == torch.stack(drawn(elements, seed=right))
    assert bool(alike.all()) == (left == right) and (left == right or alike.double().mean() < 0.05)


def test_no_block_occurs_twice_in_10000_calls_of_3_draws() -> None:
    """A draw has 4 elements. Among 120,000 random numbers of 63 bits, two are equal with a probability of 10^-9."""
    shared = torch.stack([schedule(torch.tensor([11, call])) for call in range(10_000)], -1).unsqueeze(-1)
    blocks = [bits63(block(torch.arange(4), shared, number)) for number in range(3)]
    assert {numbers.shape for numbers in blocks} == {(10_000, 4)}
    assert torch.stack(blocks).unique().numel() == 120_000
