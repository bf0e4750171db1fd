"""Blocks and warps of the kernels for products of one row.

Inductor gives each column of the product to a program of one warp.  An H100 starts at most one program per cycle.  Starting 3072
programs takes 1.7 of the 3 us of a kernel.

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
"""The metadata key of a product of one row.  The value is its length and its columns."""

SHORTEST, LONGEST = 256, 16384
"""The least and the most elements of a row for which blocks are chosen.  A longer row does not fit the registers of one program."""

MOST, ELEMENTS = 4, 4096
"""The most columns of a program, and the most elements that several columns of a program have together."""

NORMED = 2, 1
"""The most columns, and the warps, of a program that first computes the row by reductions.  A single warp does not wait for other
warps."""

PROGRAMS = 384
"""The number of programs that keeps an H100 busy."""


def mark(graph: Graph) -> None:
    """Marks, in the metadata, sums that are products of one row with a matrix whose columns are contiguous in memory."""
    for node in graph.find_nodes(op="call_function", target=SUM):
        product = one_product(node, LONGEST)
        place = place_of(product.matrix) if product is not None and product.rows == 1 else None
        if product is not None and place is not None and place.strides[-2] == 1:
            node.meta[MARK] = product.length, product.columns


class RowBlocks(InductorChoices):
    """Inductor's choices of kernel arguments, overridden for kernels of products that `mark` marked."""

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of Inductor's class for a kernel."""
        defaults: dict[str, Any] = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        config = _config(features)
        if config is None:
            return defaults
        options = {"XBLOCK": config[0], "num_warps": config[1], "num_stages": 1}
        return {
            **defaults,
            "fixed_config": FixedTritonConfig(options),
            "override_persistent_reduction": True,
            "override_cooperative_reduction": False,
        }


def _config(features: Any) -> tuple[int, int] | None:
    """Returns the columns and warps of a program for a kernel with a marked product, or None."""
    reductions = features.reduction_nodes()
    marks = {origin.meta[MARK] for node in reductions for origin in node.node.get_origins() if MARK in origin.meta}
    for length, columns in marks:
        if (features.reduction_numel, features.numel) == (length, columns):
            return blocks(length, columns, len(reductions) > 1)
    return None


def blocks(length: int, columns: int, normed: bool) -> tuple[int, int] | None:
    """Returns columns and warps of a program, or None for Inductor's choice.  `normed`: the program also computes the row."""
    if not SHORTEST <= length <= LONGEST:
        return None
    padded = 1 << (length - 1).bit_length()
    limit, warps = NORMED if normed and padded <= 1024 else (MOST, 4 if padded <= 1024 else 8 if padded <= 4096 else 16)
    count = max(1, min(limit, ELEMENTS // padded))
    while count > 1 and columns < count * PROGRAMS:
        count //= 2
    return count, warps
