"""Blocks and warps of the kernels for products of one row.

Inductor gives a column of the product to a program of one warp.  What comes before the product, a norm, is then read and computed
by so many programs, and they do not fit onto the GPU at once.

Private interfaces (torch 2.11, 2.13): `InductorChoices.triton_kernel_kwargs` with its arguments, `FixedTritonConfig`.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.triton import FixedTritonConfig
from torch.fx import Graph, Node

from .products import SUM

MARK = "cgcompile_product_of_one_row"
"""The metadata of a sum that is such a product: its length and its columns."""

SHORTEST, LONGEST = 256, 4096
"""Elements of a row that is in the registers of one program, and for which that matters."""

MOST, ELEMENTS = 4, 4096
"""Columns of a program, at most, and elements."""

PROGRAMS = 384
"""So many are enough to keep an H100 busy.  It begins one in a cycle (1.1 ns), so that 3072 take longer than what they read."""


def mark(graph: Graph) -> None:
    """Notes in the metadata which sums are products of one row."""
    for node in graph.find_nodes(op="call_function", target=SUM):
        found = _product(node)
        if found is not None:
            node.meta[MARK] = found


def _product(total: Node) -> tuple[int, int] | None:
    """Length and columns, of a sum over elements that lie side by side."""
    given = total.args[0].meta.get("val") if isinstance(total.args[0], Node) else None
    axes = list(total.args[1])
    if given is None or len(axes) != 1 or given.dim() < 2 or "mul" not in str(total.args[0].target):
        return None
    axis = axes[0] % given.dim()
    if axis < given.dim() - 2 or not all(isinstance(size, int) for size in given.shape):
        return None
    length = given.shape[axis]
    return (length, given.numel() // length) if length <= LONGEST else None


class RowBlocks(InductorChoices):
    """Inductor's choices, and ours for these kernels."""

    def triton_kernel_kwargs(self, kernel_cls: Any, features: Any, groups: Any, kernel_kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of Inductor's class for a kernel."""
        given: dict[str, Any] = super().triton_kernel_kwargs(kernel_cls, features, groups, kernel_kwargs)
        config = _config(features)
        if config is None or len(groups[0] if isinstance(groups, list) else groups) != 2:
            return given
        named = {"XBLOCK": config[0], "num_warps": config[1], "num_stages": 1}
        return {
            **given,
            "fixed_config": FixedTritonConfig(named),
            "override_persistent_reduction": True,
            "override_cooperative_reduction": False,
        }


def _config(features: Any) -> tuple[int, int] | None:
    marks = [origin.meta[MARK] for node in features.reduction_nodes() for origin in node.node.get_origins() if MARK in origin.meta]
    same = [each for each in marks if features.reduction_numel == each[0] and features.numel == each[1]]
    if not same or not marks:
        return None
    return blocks(*same[0])


def blocks(length: int, columns: int) -> tuple[int, int] | None:
    """Columns of a program, and its warps; None: as Inductor has it."""
    if not SHORTEST <= length <= LONGEST:
        return None
    whole = 1 << (length - 1).bit_length()
    most = max(1, min(MOST, ELEMENTS // whole))
    count = most
    while count > 1 and columns < count * PROGRAMS:
        count //= 2
    return count, 4 if count * whole <= ELEMENTS and whole <= 1024 else 8
