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

CHUNK, PROGRAMS = 8192, 64
"""Bytes that are asked for at once, and programs that do."""

ASK = (
    "{{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
    "@first cp.async.bulk.prefetch.L2.global [$1], {bytes}; mov.u32 $0, 0; }}"
)
"""PTX of sm_90 and later that nothing waits for; one thread executes it."""

LONGEST = 1 << 20
"""Elements of a row, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """The first `chunks` of a weight; `step` elements are one."""

    weight: Node
    chunks: int
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
        if memory.op == "placeholder" and memory.meta["val"].is_contiguous():
            (weights if product.rows == 1 else caches).append(memory)
    prefetches = []
    left = BYTES if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else 0
    for fromkey in dict.fromkeys([*caches, *weights]):
        value = fromkey.meta["val"]
        chunks = min(left, value.numel() * value.element_size()) // CHUNK
        if chunks > 0:
            prefetches.append(Ahead(weight=fromkey, chunks=chunks, step=CHUNK // value.element_size()))
            left -= chunks * CHUNK
    return tuple(prefetches)


def lines_of(names: Sequence[str], weights: Sequence[Ahead], dtype: str) -> list[str]:
    """Python for the programs numbered from 0 by `part`.  The compiler keeps what has a result that is stored; none ever is."""
    lines = []
    text = ASK.format(bytes=CHUNK)
    for name, weight in zip(names, weights, strict=True):
        lines += [
            f"for chunk in range(part, {weight.chunks}, {PROGRAMS}):",
            f"    place = {name} + chunk * {weight.step}",
            f'    none = tl.inline_asm_elementwise("{text}", "=r,l", [place], tl.int32, is_pure=True, pack=1)',
            f"    tl.store(out_ptr + none, none.to({dtype}), none != 0)",
        ]
    return lines
