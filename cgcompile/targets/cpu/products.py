"""Which programs are likely to need no more than the products that a bundle brings: float32 ones, where they were measured."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.processor import processor_flags

from ..instruction_sets import X86_64, Level

VECTORS = "avx2"
"""As /proc/cpuinfo names them.  With fewer, and on processors of another kind, our products were not measured beside torch's."""

PRODUCTS = frozenset({
    f"aten.{name}"
    for name in (
        "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "dot", "einsum", "inner", "linear", "matmul",
        "mm", "mv", "scaled_dot_product_attention", "tensordot", "vdot",
    )
})  # fmt: skip
"""Operators that become products of libraries."""

SUITED = (torch.float32, torch.bool)
"""Dtypes of what they take: numbers and masks."""


def suits(program: ExportedProgram, level: Level | None) -> bool:
    """Whether to link our functions first.  What they lack is only known when the code is linked, and what a function cannot do
    when it runs; both are rare where this holds.  `level`: None for processors like this one."""
    features = level.features if level is not None else processor_flags()
    return os.uname().machine == X86_64 and VECTORS in features and all(each.dtype in SUITED for each in _factors(program))


def _factors(program: ExportedProgram) -> Iterator[torch.Tensor]:
    """The tensors that products take, inside branches and loops too."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if str(getattr(node.target, "overloadpacket", "")) in PRODUCTS:
                given = [each.meta.get("val") for each in tree_leaves((node.args, node.kwargs)) if isinstance(each, Node)]
                yield from [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]
