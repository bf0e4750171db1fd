"""Which recorded keys serve a call: pure, and tested without a GPU.

Every declared dimension is planned by itself (the recorded keys are the product of the dimensions' sizes); a call's plan is the
product of the dimensions' cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from ..errors import CallError
from ..format.schema import Dimension

POLICIES = ("pad", "chunk", "error")

MOST_PIECES = 1 << 20
"""Replays of one call: a call of more rows, as a broadcast array may have, would fill the memory with its plan alone."""

_LARGE = "call it with parts of its inputs"


class Cut(NamedTuple):
    """Along one dimension: `length` of the call's size from `start` on, served by the recorded `size` >= length."""

    start: int
    length: int
    size: int


Piece = tuple[Cut, ...]
"""One replay: a cut for every dimension, in declared order."""


def plan(
    dimensions: Sequence[Dimension], sizes: Sequence[int], on_miss: str, where: Callable[[str], str] = str
) -> tuple[Piece, ...]:
    """The replays that serve a call whose dimensions have `sizes`; one exact piece when the key was recorded.

    `where` says where a dimension shows in the call ("input 'ids', axis 0"), for messages.  Raises key-missing, naming that
    place and the sizes recorded; its hint says why the build does not allow padding or cutting.
    """
    cuts = []
    for dimension, size in zip(dimensions, sizes, strict=True):
        try:
            cuts.append(_cuts(dimension, size, on_miss))
        except CallError as error:
            raise CallError("key-missing", f"{where(dimension.name)}: {error}", error.hint) from None
    if prod(map(len, cuts)) > MOST_PIECES:
        raise CallError("key-missing", f"the call would take more than {MOST_PIECES} replays", _LARGE)
    return tuple(product(*cuts))


_EMPTY = "answer an empty call yourself: a size of 1 is the least that a bundle can have"
_NO_POLICY = 'call with a recorded size, or load the bundle with on_miss="pad" or "chunk"'


def _cuts(dimension: Dimension, size: int, on_miss: str) -> list[Cut]:
    if size in dimension.sizes:
        return [Cut(0, size, size)]
    if size < 1:
        raise CallError("key-missing", f"got {dimension.name}={size}: there is nothing to run", _EMPTY)
    if on_miss == "error":
        raise CallError("key-missing", f"expected a recorded {dimension.name} ({_list(dimension)}), got {size}", _NO_POLICY)
    most = MOST_PIECES * dimension.sizes[-1]
    if size > most:
        raise CallError("key-missing", f"expected at most {dimension.name}={most}, {MOST_PIECES} replays, got {size}", _LARGE)
    pads, smallest, largest = dimension.pad != "no", dimension.sizes[0], dimension.sizes[-1]
    if dimension.chunk and size > smallest and (on_miss == "chunk" or size > largest or not pads):
        largest_first = on_miss == "pad" and pads
        pieces = _largest_first(dimension.sizes, size) if largest_first else _fewest_wasted(dimension.sizes, size, exact=not pads)
        if pieces:
            return _place(pieces, size)
    if size <= largest and pads:
        return [Cut(0, size, next(recorded for recorded in dimension.sizes if recorded >= size))]
    raise _refusal(dimension, size)


def _largest_first(sizes: Sequence[int], size: int) -> list[int]:
    whole, rest = divmod(size, sizes[-1])
    return [sizes[-1]] * whole + ([next(recorded for recorded in sizes if recorded >= rest)] if rest else [])


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
    pieces = [largest] * bulk
    while reached > 0:
        pieces.append(best[reached][1])
        reached -= best[reached][1]
    return sorted(pieces, reverse=True)


def _place(pieces: Sequence[int], size: int) -> list[Cut]:
    cuts, start = [], 0
    for piece in pieces:
        cuts.append(Cut(start, min(piece, size - start), piece))
        start += piece
    return cuts


def _refusal(dimension: Dimension, size: int) -> CallError:
    """The reason, which may quote the model's source, is the hint's: a server sends the message to its clients."""
    name, largest, why = dimension.name, dimension.sizes[-1], dimension.reason
    if dimension.chunk:
        expected, refused = f"a sum of recorded {name} ({_list(dimension)})", f"{name} cannot be padded"
    elif size > largest:
        expected, refused, why = f"at most {name}={largest}", f"a call cannot be chunked along {name}", dimension.not_chunked or why
    else:
        expected, refused = f"a recorded {name} ({_list(dimension)})", f"{name} cannot be padded"
    hint = f"build the bundle with {name}={size} among its --sizes" + (
        ", or more" if dimension.pad != "no" and size > largest else ""
    )
    return CallError("key-missing", f"expected {expected}, got {size}, and {refused}", f"{hint} ({refused}: {why})")


def _list(dimension: Dimension) -> str:
    return ", ".join(map(str, dimension.sizes))
