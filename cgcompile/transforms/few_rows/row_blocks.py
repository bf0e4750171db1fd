"""Blocks and warps of the kernels for products of one row.

Inductor gives a column of the product to a program of one warp, and an H100 begins no more than one in a cycle: 3072 programs take
1.7 us, where a kernel takes 3.

Private interfaces (torch 2.11, 2.13): `InductorChoices.triton_kernel_kwargs` with its arguments, `FixedTritonConfig`.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig
from torch.fx import Graph

from .places import place_of
from .products import SUM, one_product

MARK = "cgcompile_product_of_one_row"
"""The metadata of such a product: its length and its columns."""

SHORTEST, LONGEST = 256, 16384
"""Elements of a row that is in the registers of one program, and for which that matters."""

MOST, ELEMENTS = 4, 4096
"""Columns of a program, at most, and elements."""

NORMED = 2, 1
"""Columns and warps of a program that makes the row first, by reductions: one warp does so for all its columns, without waiting for
others."""

PROGRAMS = 384
"""So many keep an H100 busy."""


def mark(graph: Graph) -> None:
    """Notes in the metadata which sums are products of one row, with a matrix whose elements for a column lie side by side."""
    for node in graph.find_nodes(op="call_function", target=SUM):
        product = one_product(node, LONGEST)
        place = place_of(product.matrix) if product is not None and product.rows == 1 else None
        if product is not None and place is not None and place.strides[-2] == 1:
            node.meta[MARK] = product.length, product.columns


class RowBlocks(InductorChoices):
    """Inductor's choices, and ours for these kernels."""

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of Inductor's class for a kernel."""
        defaults: dict[str, Any] = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        config = _config(features)
        if config is None:
            return defaults
        named = {"XBLOCK": config[0], "num_warps": config[1], "num_stages": 1}
        return {
            **defaults,
            "fixed_config": FixedTritonConfig(named),
            "override_persistent_reduction": True,
            "override_cooperative_reduction": False,
        }


def _config(features: Any) -> tuple[int, int] | None:
    """Of a kernel with such a product."""
    reductions = features.reduction_nodes()
    marks = {origin.meta[MARK] for node in reductions for origin in node.node.get_origins() if MARK in origin.meta}
    for length, columns in marks:
        if (features.reduction_numel, features.numel) == (length, columns):
            return blocks(length, columns, len(reductions) > 1)
    return None


def blocks(length: int, columns: int, normed: bool) -> tuple[int, int] | None:
    """Columns of a program, and its warps; None: as Inductor has it."""
    if not SHORTEST <= length <= LONGEST:
        return None
    whole = 1 << (length - 1).bit_length()
    most, warps = NORMED if normed and whole <= 1024 else (MOST, 4 if whole <= 1024 else 8 if whole <= 4096 else 16)
    count = max(1, min(most, ELEMENTS // whole))
    while count > 1 and columns < count * PROGRAMS:
        count //= 2
    return count, warps
