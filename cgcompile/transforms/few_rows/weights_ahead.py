"""Weights and caches that come next, brought into the GPU's cache by a kernel of few programs, which leaves the memory idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .places import place_of
from .products import SUM, one_product

BYTES = 8 << 20
"""Of weights, at most: about as much as the memory gives while a kernel of few programs runs."""

PREFETCH = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
"""PTX that nothing waits for."""

PROGRAMS = 128
"""How many programs bring weights: about one for every multiprocessor."""

SECTOR, BLOCK = 32, 1024
"""Bytes that come together, and how many of those a program asks for at once."""

LONGEST = 1 << 20
"""Elements of a row, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """The first `sectors` of a weight; `step` elements are a sector."""

    weight: Node
    sectors: int
    step: int


def weights_ahead(node: Node) -> tuple[Ahead, ...]:
    """Those of the products behind a node until the next attention, in order; before them the caches that this one reads."""
    weights: list[Node] = []
    caches: list[Node] = []
    while len(caches) < 2 and (node := node.next).op == "call_function":
        product = one_product(node, LONGEST) if node.target is SUM else None
        place = None if product is None else place_of(product.matrix)
        if product is None or place is None:
            continue
        memory = place.base.args[0] if place.base.target is torch.ops.aten.index_put.default else place.base
        if memory.op == "placeholder":
            (weights if product.rows == 1 else caches).append(memory)
    found = []
    left = BYTES
    for each in dict.fromkeys([*caches, *weights]):
        value = each.meta["val"]
        sectors = min(left, value.numel() * value.element_size()) // SECTOR
        if sectors:
            found.append(Ahead(weight=each, sectors=sectors, step=SECTOR // value.element_size()))
        left -= sectors * SECTOR
    return tuple(found)


def lines_of(names: Sequence[str], weights: Sequence[Ahead], dtype: str) -> list[str]:
    """Python for the programs numbered from 0 by `part`.  The compiler keeps what has a result that is stored; none ever is."""
    lines = [f"first = part * {BLOCK} + tl.arange(0, {BLOCK})"]
    for name, each in zip(names, weights, strict=True):
        lines += [
            f"for start in range(0, {each.sectors}, {PROGRAMS * BLOCK}):",
            f"    place = {name} + tl.minimum(start + first, {each.sectors - 1}) * {each.step}",
            f'    none = tl.inline_asm_elementwise("{PREFETCH}", "=r,l", [place], dtype=tl.int32, is_pure=True, pack=1)',
            f"    tl.store(out_ptr + none, none.to({dtype}), none != 0)",
        ]
    return lines
