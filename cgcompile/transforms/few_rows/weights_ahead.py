"""Prefetches the next weights and caches into the L2 cache, during a kernel of few programs that leaves the memory idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from .places import place_of
from .products import SUM, one_product

BYTES = 8 << 20
"""The most bytes to prefetch: about what the memory delivers while a kernel of few programs runs."""

CHUNK, PROGRAMS = 8192, 64
"""Bytes of one prefetch, and the number of programs that prefetch."""

ASK = (
    "{{ .reg .pred first; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 first, thread, 0; "
    "@first cp.async.bulk.prefetch.L2.global [$1], {bytes}; mov.u32 $0, 0; }}"
)
"""PTX of sm_90 and later.  One thread executes it, and nothing waits for it."""

LONGEST = 1 << 20
"""The most elements of a row of a product whose weight is prefetched."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """The first `chunks` chunks of a weight or cache, each of `step` elements."""

    weight: Node
    chunks: int
    step: int


def weights_ahead(node: Node) -> tuple[Ahead, ...]:
    """Returns the caches that the next attention reads, and then the weights of the products before it, in order."""
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
    budget = BYTES if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else 0
    for memory_node in dict.fromkeys([*caches, *weights]):
        value = memory_node.meta["val"]
        chunks = min(budget, value.numel() * value.element_size()) // CHUNK
        if chunks > 0:
            prefetches.append(Ahead(weight=memory_node, chunks=chunks, step=CHUNK // value.element_size()))
            budget -= chunks * CHUNK
    return tuple(prefetches)


def lines_of(names: Sequence[str], weights: Sequence[Ahead], dtype: str) -> list[str]:
    """Returns lines for the programs that prefetch; `part` is a program's number, from 0.  A store, which never runs, keeps the
    compiler from removing these lines."""
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
