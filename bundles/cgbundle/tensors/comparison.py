"""Compares results of a replay with expected ones, by the rules of FORMAT.md. Large tensors of a self-test are condensed to hashes
of blocks. For floats that may differ there are also samples (one of STEP elements, at varying positions, so that permuted rows
differ) and statistics (largest absolute value, mean, root mean square). They differ at most by the worst element's error, so a
tensor within its bound passes. A wrong element below its block's largest value may pass unnoticed, unless only hashes are
stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from math import fsum, inf, nan, sqrt
from typing import Any

from ..errors import BundleError
from ..format.file_names import SELF_TEST, is_exact
from ..format.safetensors import Entry
from ..format.safetensors_files import Mapped, stored
from ..format.schema import DTYPES
from .numbers import decode


def difference(dtype: str, expected: bytes, got: bytes) -> float:
    """The error of `got`, both row-major. Integers and booleans: the share of different elements. Others (complex as two parts):
    the largest |got - expected| over the largest finite |expected|; infinite if only one of two is NaN or infinite, or for other
    lengths."""
    if len(expected) != len(got):
        return inf
    if is_exact(dtype):
        count = sum([x != y for _, one, other in _blocks(dtype, expected, got) for x, y in zip(one, other, strict=True)])
        return float(count * DTYPES[dtype] / max(1, len(expected)))
    largest, furthest = 0.0, 0.0
    for _, one, other in _blocks(dtype, expected, got, alike=True):
        largest = max(largest, max((abs(x) for x in one if x - x == 0), default=0.0))
        if one is not other:
            furthest = max(furthest, max(map(_apart, one, other), default=0.0))
    return furthest / (largest or 1.0)


def describe(dtype: str, shape: Sequence[int], expected: bytes, got: bytes) -> str:
    """The differences in words: `3 of 8 values differ, first at [2]: 17, expected 12`; for floats the largest difference."""
    if len(expected) != len(got):
        return f"{len(got)} bytes, expected {len(expected)}"
    parts = 2 if dtype.startswith("complex") else 1
    total, count = len(expected) * parts // DTYPES[dtype], 0
    worst: tuple[float, int, object, object] = (0.0, 0, None, None)
    for first, one, other in _blocks(dtype, expected, got):
        for place, (x, y) in enumerate(zip(one, other, strict=True), first):
            if x == y or (x != x and y != y):
                continue
            count += 1
            distance = inf if is_exact(dtype) else _apart(x, y)  # infinite: keeps the first place
            if distance > worst[0]:
                worst = distance, place, x, y
    if not count:
        return "equal values, other bits"
    _, place, x, y = worst
    where, element = "", place // parts
    for size in reversed(shape):
        element, at = divmod(element, size)
        where = f"{at}{', ' if where else ''}{where}"
    counted = f"{count} of {total} {'parts' if parts == 2 else 'values'} differ"
    which = f"{'first' if is_exact(dtype) else 'furthest off'}{f' at [{where}]' if where else ''}"
    got_text, expected_text = [f"{value:.6g}" if type(value) is float else str(value) for value in (y, x)]
    return f"{counted}, {which}: {got_text}, expected {expected_text}"


def _blocks(dtype: str, expected: bytes, got: bytes, *, alike: bool = False) -> Iterator[tuple[int, list[Any], list[Any]]]:
    """Yields (number of its first element, both lists of numbers) of every different block; with `alike` also of equal blocks
    except zeros, with the same list twice."""
    parts, zeros = 2 if dtype.startswith("complex") else 1, bytes(BLOCK)
    for begin in range(0, len(expected), BLOCK):
        one, other = expected[begin : begin + BLOCK], got[begin : begin + BLOCK]
        if one != other or (alike and one != zeros[: len(one)]):
            numbers = decode(dtype, one)
            yield begin * parts // DTYPES[dtype], numbers, decode(dtype, other) if one != other else numbers


def nearest(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The (error, bound) with the largest error in proportion to its bound; (0, 0) without pairs."""
    return max(pairs, key=lambda pair: pair[0] / pair[1] if pair[1] else (inf if pair[0] else -1.0), default=(0.0, 0.0))


def _apart(x: float, y: float) -> float:
    """The distance of two numbers; infinite if only one is NaN."""
    return 0.0 if x == y or (x != x and y != y) else _distance(x, y)


def _distance(x: float, y: float) -> float:
    """The distance of two finite numbers, else infinite."""
    distance = abs(x - y)
    return distance if distance == distance else inf


# --- condensed tensors ---------------------------------------------------------------------------------------------------


BLOCK = 1 << 16
"""Bytes that are decoded or hashed at a time, a multiple of every element. As Python numbers, 0.5 GB would take 16 GB."""

STEP = 16  # elements per sample
DIGEST = 16  # bytes of a block's SHA-256
SPREAD = 2654435761  # Knuth's multiplicative hash, spreads the samples' places
HASHES, SAMPLES, STATISTICS = ".hashes", ".samples", ".statistics"
"""Suffixes of the names of a condensed tensor's parts."""


def sample_count(elements: int) -> int:
    return -(-elements // STEP)


def place_of(sample: int, elements: int) -> int:
    """The position of a sample's element."""
    first = sample * STEP
    return first + (sample * SPREAD >> 7) % min(STEP, elements - first)


def expected_shapes(name: str, dtype: str, elements: int) -> tuple[dict[str, tuple[str, tuple[int, ...]]], ...]:
    """(dtype, shape) by name of the condensed forms of a tensor: for equal bits, and for a tolerance."""
    blocks = -(-elements * DTYPES[dtype] // BLOCK)
    hashes: dict[str, tuple[str, tuple[int, ...]]] = {name + HASHES: ("uint8", (blocks, DIGEST))}
    samples = {name + SAMPLES: (dtype, (sample_count(elements),)), name + STATISTICS: ("float64", (blocks, 3))}
    return hashes, hashes | samples


def block_hashes(data: bytes) -> bytes:
    return b"".join([sha256(data[begin : begin + BLOCK]).digest()[:DIGEST] for begin in range(0, len(data), BLOCK)])


def statistics(dtype: str, block: bytes) -> tuple[float, float, float]:
    """Largest absolute value, mean, and root mean square of a block; NaN if a number is not finite."""
    numbers = decode(dtype, block)
    total = sum(numbers)
    if total - total != 0:
        return nan, nan, nan
    mean, square = fsum(numbers) / len(numbers), fsum([x * x for x in numbers]) / len(numbers)
    return max(max(numbers), -min(numbers)), mean, sqrt(square)


def taken(dtype: str, data: bytes) -> bytes:
    """The samples of a tensor."""
    width = DTYPES[dtype]
    elements = len(data) // width
    places = [place_of(sample, elements) * width for sample in range(sample_count(elements))]
    return b"".join([data[place : place + width] for place in places])


def compare(dtype: str, stored: Mapping[str, bytes], got: bytes) -> tuple[float, str]:
    """(error, text) of a tensor against its condensed form, by suffix; text is "" for equal bits. The error is as in `difference`,
    as far as samples and statistics show it; without them the share of different blocks for integers, infinite for floats."""
    expected, hashes = stored[HASHES], block_hashes(got)
    blocks = [at // DIGEST for at in range(0, len(expected), DIGEST) if expected[at : at + DIGEST] != hashes[at : at + DIGEST]]
    if not blocks:
        return 0.0, ""
    count = len(expected) // DIGEST
    text = f"{len(blocks)} of {count} blocks of {BLOCK} bytes differ, first number {blocks[0]}"
    if SAMPLES not in stored:
        return (len(blocks) / count if is_exact(dtype) else inf), text
    numbers = decode("float64", stored[STATISTICS])
    rows = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    scale, furthest = max([largest for largest, _, _ in rows]) or 1.0, 0.0
    pairs = zip(decode(dtype, stored[SAMPLES]), decode(dtype, taken(dtype, got)), strict=True)
    for number, (x, y) in enumerate(pairs):
        if (distance := _distance(x, y)) > furthest:
            furthest, text = distance, f"sample {number // (2 if dtype.startswith('complex') else 1)}: {y:.6g}, expected {x:.6g}"
    for block in blocks:
        actual = statistics(dtype, got[block * BLOCK : (block + 1) * BLOCK])
        for what, x, y in zip(("largest absolute value", "mean", "root mean square"), rows[block], actual, strict=True):
            if (distance := _distance(x, y)) > furthest:
                furthest, text = distance, f"block {block}: its {what} is {y:.6g}, expected {x:.6g}"
    return furthest / scale, text


def compare_stored(self_test: Mapped, name: str, dtype: str, got: bytes) -> tuple[float, str]:
    """As `compare`, for tensor `name` of a self-test. Raises weights-invalid if its condensed form does not match."""
    endings, elements = stand_in(self_test.entries, name), len(got) // DTYPES[dtype]
    for shapes in expected_shapes(name, dtype, elements):
        if shapes.keys() == {name + ending for ending in endings}:
            if any((self_test.entries[part].dtype, self_test.entries[part].shape) != shape for part, shape in shapes.items()):
                break
            return compare(dtype, {ending: bytes(stored(self_test, name + ending)) for ending in endings}, got)
    raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r}: its condensed form does not match {elements} elements")


def stand_in(entries: Mapping[str, Entry], name: str) -> tuple[str, ...]:
    """The suffixes of a tensor's condensed form; () without one."""
    return tuple([ending for ending in (HASHES, SAMPLES, STATISTICS) if name + ending in entries])
