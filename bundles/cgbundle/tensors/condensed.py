"""A large tensor of a self-test, condensed: hashes of its blocks and, where floats may differ, samples and statistics of them.

One element of every STEP is a sample, at another place of each window, so that rows that change places give other samples.
The statistics of a block are its largest absolute value, its mean, and the root of its mean square.  None of them can be
further off than the furthest element is: a tensor within its bound passes.  One element of a block that is off by less than
the block's largest value, and is no sample, may pass unseen: in a tensor with hashes alone it cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from math import fsum, inf, nan, sqrt

from ..errors import BundleError
from ..format.file_names import SELF_TEST
from ..format.safetensors import Entry, Mapped
from ..format.schema import DTYPES
from .self_test_tensors import is_exact, stored

BLOCK = 1 << 16
"""Bytes of a block, a multiple of every element."""

STEP = 16
"""Elements of which one is a sample."""

DIGEST = 16
"""Bytes of a block's SHA-256 that are kept."""

SPREAD = 2654435761
"""Knuth's multiplicative hash: spreads the samples' places within their windows."""

HASHES, SAMPLES, STATISTICS = ".hashes", ".samples", ".statistics"
"""What stands behind a tensor's name in the names of what takes its place."""


def sample_count(elements: int) -> int:
    """How many samples a tensor of so many elements has."""
    return -(-elements // STEP)


def place_of(sample: int, elements: int) -> int:
    """The element that a sample is."""
    first = sample * STEP
    return first + (sample * SPREAD >> 7) % min(STEP, elements - first)


def expected_shapes(name: str, dtype: str, elements: int) -> tuple[dict[str, tuple[str, tuple[int, ...]]], ...]:
    """By name (dtype, shape) of what may take the place of a tensor: where its bits have to be equal, and where they may differ."""
    blocks = -(-elements * DTYPES[dtype] // BLOCK)
    hashes: dict[str, tuple[str, tuple[int, ...]]] = {name + HASHES: ("uint8", (blocks, DIGEST))}
    near = hashes | {
        name + SAMPLES: (dtype, (sample_count(elements),)),
        name + STATISTICS: ("float64", (blocks, 3)),
    }
    return hashes, near


def block_hashes(data: bytes) -> bytes:
    """A digest of every block, one after the other."""
    return b"".join([sha256(data[begin : begin + BLOCK]).digest()[:DIGEST] for begin in range(0, len(data), BLOCK)])


def statistics(dtype: str, block: bytes) -> tuple[float, float, float]:
    """Of a block the largest absolute value, the mean, and the root of the mean square; NaN where a number is not finite."""
    from .numbers import decode  # no load needs it

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
    """(error, text) of a tensor beside what takes its place in a self-test, by the endings of the names; text is "" for equal bits.

    The error is as in `comparison.difference`, as far as samples and statistics show it.  Without these it is the share of
    integers' blocks that differ, and infinite for floats.
    """
    wanted, hashes = stored[HASHES], block_hashes(got)
    others = [at // DIGEST for at in range(0, len(wanted), DIGEST) if wanted[at : at + DIGEST] != hashes[at : at + DIGEST]]
    if not others:
        return 0.0, ""
    count = len(wanted) // DIGEST
    text = f"{len(others)} of {count} blocks of {BLOCK} bytes differ, first number {others[0]}"
    if SAMPLES not in stored:
        return (len(others) / count if is_exact(dtype) else inf), text
    from .numbers import decode  # no load needs it

    numbers = decode("float64", stored[STATISTICS])
    rows = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
    scale, furthest = max([largest for largest, _, _ in rows]) or 1.0, 0.0
    pairs = zip(decode(dtype, stored[SAMPLES]), decode(dtype, taken(dtype, got)), strict=True)
    for number, (x, y) in enumerate(pairs):
        if (apart := _apart(x, y)) > furthest:
            furthest, text = apart, f"sample {number // (2 if dtype.startswith('complex') else 1)}: {y:.6g}, expected {x:.6g}"
    for block in others:
        actual = statistics(dtype, got[block * BLOCK : (block + 1) * BLOCK])
        for what, x, y in zip(("largest absolute value", "mean", "root mean square"), rows[block], actual, strict=True):
            if (apart := _apart(x, y)) > furthest:
                furthest, text = apart, f"block {block}: its {what} is {y:.6g}, expected {x:.6g}"
    return furthest / scale, text


def compare_stored(self_test: Mapped, name: str, dtype: str, got: bytes) -> tuple[float, str]:
    """As `compare`, of the tensor `name` of a self-test.  Raises weights-invalid where what takes its place does not fit `got`."""
    endings, elements = stand_in(self_test.entries, name), len(got) // DTYPES[dtype]
    for shapes in expected_shapes(name, dtype, elements):
        if shapes.keys() == {name + ending for ending in endings}:
            if any((self_test.entries[part].dtype, self_test.entries[part].shape) != shape for part, shape in shapes.items()):
                break
            return compare(dtype, {ending: bytes(stored(self_test, name + ending)) for ending in endings}, got)
    raise BundleError("weights-invalid", f"{SELF_TEST}: tensor {name!r}: its condensed form does not match {elements} elements")


def stand_in(entries: Mapping[str, Entry], name: str) -> tuple[str, ...]:
    """The endings of what takes the place of a tensor in a self-test; () where nothing does."""
    return tuple([ending for ending in (HASHES, SAMPLES, STATISTICS) if name + ending in entries])


def _apart(x: float, y: float) -> float:
    distance = abs(x - y)
    return distance if distance == distance else inf
