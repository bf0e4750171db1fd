"""Blocks and warps of the kernels for products of one row.

Inductor gives a column of the product to a program of one warp.  What comes before the product, a norm, is then read and computed
by so many programs, and they do not fit onto the GPU at once.

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

SHORTEST, LONGEST = 256, 4096
"""Elements of a row that is in the registers of one program, and for which that matters."""

MOST, ELEMENTS = 4, 4096
"""Columns of a program, at most, and elements."""

PROGRAMS = 384
"""So many are enough to keep an H100 busy.  It begins one in a cycle (1.1 ns), so that 3072 take longer than what they read."""


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
        given: dict[str, Any] = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        config = _config(features)
        if config is None:
            return given
        named = {"XBLOCK": config[0], "num_warps": config[1], "num_stages": 1}
        return {
            **given,
            "fixed_config": FixedTritonConfig(named),
            "override_persistent_reduction": True,
            "override_cooperative_reduction": False,
        }


def _config(features: Any) -> tuple[int, int] | None:
    """Of a kernel with such a product."""
    origins = [origin for node in features.reduction_nodes() for origin in node.node.get_origins()]
    found = {origin.meta[MARK] for origin in origins if MARK in origin.meta}
    own = [sizes for sizes in found if (features.reduction_numel, features.numel) == sizes]
    return blocks(*own[0]) if own else None


def blocks(length: int, columns: int) -> tuple[int, int] | None:
    """Columns of a program, and its warps; None: as Inductor has it."""
    if not SHORTEST <= length <= LONGEST:
        return None
    whole = 1 << (length - 1).bit_length()
    count = min(MOST, ELEMENTS // whole)
    while count > 1 and columns < count * PROGRAMS:
        count //= 2
    return count, 4 if whole <= 1024 else 8
