"""Which recorded keys serve a call whose sizes were not recorded: padded, or in chunks.  Pure.

Every dimension is planned by itself: the recorded keys are the product of the dimensions' sizes, and a call's plan is the product
of their chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from ..errors import CallError
from ..format.schema import Dimension

MOST_PIECES = 1 << 20
"""Replays of one call: a call of more rows, as a broadcast array may have, would fill the memory with its plan alone."""


class Chunk(NamedTuple):
    """Along one dimension: `length` of the call's size from `start` on, served by the recorded `size` >= length."""

    start: int
    length: int
    size: int


Replay = tuple[Chunk, ...]
"""One replay: a chunk of every dimension, in declared order."""

_LARGE = "call it with parts of its inputs"
_EMPTY = "answer an empty call yourself: a size of 1 is the least that a bundle can have"
_NO_POLICY = 'call with a recorded size, or load the bundle with on_miss="pad" or "chunk"'


def pieces(
    dimensions: Sequence[Dimension], sizes: Sequence[int], on_miss: str, where: Callable[[str], str] = str
) -> tuple[Replay, ...]:
    """The replays that serve a call whose dimensions have `sizes`; one exact piece when the key was recorded.

    `where` says where a dimension shows in the call ("input 'ids', axis 0"), for messages.  Raises key-missing, naming that
    place and the sizes recorded; its hint says why the build does not allow padding or chunks.
    """
    chunks = []
    for dimension, size in zip(dimensions, sizes, strict=True):
        try:
            chunks.append(_chunks(dimension, size, on_miss))
        except CallError as error:
            raise CallError("key-missing", f"{where(dimension.name)}: {error}", error.hint) from None
    if prod(map(len, chunks)) > MOST_PIECES:
        raise CallError("key-missing", f"the call would take more than {MOST_PIECES} replays", _LARGE)
    return tuple(product(*chunks))


def _chunks(dimension: Dimension, size: int, on_miss: str) -> list[Chunk]:
    name, recorded = dimension.name, dimension.sizes
    smallest, largest, pads = recorded[0], recorded[-1], dimension.pad != "no"
    if size in recorded:
        return [Chunk(0, size, size)]
    if size < 1:
        raise CallError("key-missing", f"got {name}={size}: there is nothing to run", _EMPTY)
    if on_miss == "error":
        raise CallError("key-missing", f"expected a recorded {name} ({_list(dimension)}), got {size}", _NO_POLICY)
    most = MOST_PIECES * largest
    if size > most:
        raise CallError("key-missing", f"expected at most {name}={most}, {MOST_PIECES} replays, got {size}", _LARGE)
    if dimension.chunk and size > smallest and (on_miss == "chunk" or size > largest or not pads):
        if on_miss == "pad" and pads:  # the largest first
            whole, rest = divmod(size, largest)
            steps = [largest] * whole + ([_holding(recorded, rest)] if rest else [])
        else:
            steps = _fewest_wasted(recorded, size, exact=not pads)
        if steps:
            starts = accumulate(steps, initial=0)
            return [Chunk(start, min(step, size - start), step) for start, step in zip(starts, steps, strict=False)]
    if size <= largest and pads:
        return [Chunk(0, size, _holding(recorded, size))]
    raise _refusal(dimension, size)


def _holding(recorded: Sequence[int], size: int) -> int:
    """The smallest recorded size that holds `size`."""
    return next(step for step in recorded if step >= size)


def _fewest_wasted(sizes: Sequence[int], size: int, *, exact: bool) -> list[int]:
    """Recorded sizes, largest first, that add up to at least `size` with the least excess, then the fewest pieces; [] when `exact`
    and no sum fits exactly.

    Dynamic programming over the last `largest**2` rows: above that an optimal sum always holds the largest size (of any `largest`
    smaller pieces some add up to a multiple of it).  Pieces of the smallest size waste less than one of them: beyond that no sum
    is of interest, however large the largest size is.
    """
    smallest, largest = sizes[0], sizes[-1]
    bulk = max(0, (size - largest * largest) // largest)
    rest = size - bulk * largest
    last = rest if exact else rest + smallest - 1
    never = (last + 1, 0)
    best: list[tuple[int, int]] = [(0, 0)] + [never] * last  # total -> (pieces, last piece)
    for total in range(1, last + 1):
        for piece in sizes:
            if piece <= total and best[total - piece][0] + 1 < best[total][0]:
                best[total] = (best[total - piece][0] + 1, piece)
    reached = next((total for total in range(rest, last + 1) if best[total] != never), None)
    if reached is None:
        return []
    steps = [largest] * bulk
    while reached > 0:
        steps.append(best[reached][1])
        reached -= best[reached][1]
    return sorted(steps, reverse=True)


def _refusal(dimension: Dimension, size: int) -> CallError:
    """The reason, which may quote the model's source, is the hint's: a server sends the message to its clients."""
    name, largest, why = dimension.name, dimension.sizes[-1], dimension.reason
    if dimension.chunk:
        expected, refused = f"a sum of recorded {name} ({_list(dimension)})", f"{name} cannot be padded"
    elif size > largest:
        expected, refused, why = f"at most {name}={largest}", f"a call cannot be chunked along {name}", dimension.not_chunked or why
    else:
        expected, refused = f"a recorded {name} ({_list(dimension)})", f"{name} cannot be padded"
    more = ", or more" if dimension.pad != "no" and size > largest else ""
    hint = f"build the bundle with {name}={size} among its --sizes{more} ({refused}: {why})"
    return CallError("key-missing", f"expected {expected}, got {size}, and {refused}", hint)


def _list(dimension: Dimension) -> str:
    return ", ".join(map(str, dimension.sizes))
