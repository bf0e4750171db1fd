"""Philox 4x32-10, a counter-based random generator, in ordinary operations on tensors.

Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC11 (2011); the reference is their library
Random123.  A block of four 32-bit words is a function of a counter (four words) and a key (two words).  There is no sequential
state: every element computes its own numbers, and they are the same on every device.
A word is an int64 tensor with values in [0, 2^32).  No operation overflows: in C++, which Inductor writes, the overflow of a
signed integer is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]
"""A counter or a block: four words, of shapes that broadcast."""

Key = tuple[Tensor, Tensor]

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
"""PHILOX_M4x32_0 and _1 of Random123."""

BUMPS = (0x9E3779B9, 0xBB67AE85)
"""PHILOX_W32_0 and _1 of Random123, which each round adds to the words of the key (the golden ratio, and the square root of 3)."""

ROUNDS = 10


def schedule(state: Tensor) -> Tensor:
    """Returns the words that all draws of a call share: int64 [2 * ROUNDS + 2], left and right keys of the rounds, number of calls.

    `state`: int64 [seed, calls so far].  Indices are masked before they are multiplied.  Otherwise Inductor would treat the product
    as an index, and compute it with 32 bits.  as_strided makes Inductor store the keys in memory, not compute them at every use.
    """
    lane, turn = [torch.arange(count, dtype=torch.int64, device=state.device) & MASK for count in (2, ROUNDS)]
    words = (state.unsqueeze(1) >> (lane * 32)) & MASK
    bump = (lane * (BUMPS[1] - BUMPS[0]) + BUMPS[0]).unsqueeze(1)
    keys = (words.select(0, 0).unsqueeze(1) + bump * turn) & MASK
    return torch.cat([keys.reshape(-1), words.select(0, 1)]).as_strided((2 * ROUNDS + 2,), (1,))


def block(element: Tensor, shared: Tensor, number: int) -> Words:
    """Returns the four words of every element in one draw.  `element`: int64, only the low word is used.  `shared`: the result of
    `schedule`, on the same device.  `number`: the number of the draw in its program, below 2^32.

    key = seed, counter = (element, number, calls low, calls high): no block occurs twice in 2^64 calls.
    """
    keys = [(shared.select(0, turn), shared.select(0, ROUNDS + turn)) for turn in range(ROUNDS)]
    draw = torch.full((), number, dtype=torch.int64, device=element.device)
    return philox((element & MASK, draw, shared.select(0, 2 * ROUNDS), shared.select(0, 2 * ROUNDS + 1)), keys)


def philox(counter: Words, keys: Sequence[Key]) -> Words:
    """Returns the block of four words for a counter, with the keys of the rounds."""
    first, second, third, fourth = counter
    for left, right in keys:
        high_a, low_a = _multiply(first, MULTIPLIERS[0])
        high_b, low_b = _multiply(third, MULTIPLIERS[1])
        first, second, third, fourth = high_b ^ second ^ left, low_b, high_a ^ fourth ^ right, low_a
    return first, second, third, fourth


def _multiply(word: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """Returns the high and the low word of word * constant.

    The product may reach 2^64.  So `word` is multiplied with constant - 2^32, which is above -2^30: this product is above -2^62.
    The missing 2^32 * word adds `word` to the high word and nothing to the low one.
    """
    product = word * (constant - (1 << 32))
    return (product >> 32) + word, product & MASK
