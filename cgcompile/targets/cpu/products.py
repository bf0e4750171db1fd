"""Whether the functions that a bundle can bring do what a program multiplies: float32, and pictures cut into patches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from cgbundle.cpu.machine import processor_flags

from ..instruction_sets import X86_64, Level

VECTORS = "avx2"
"""As /proc/cpuinfo names them.  With fewer, and on processors of another kind, our products were not measured beside torch's."""

CONVOLUTION = "aten.conv2d"

CONVOLUTIONS = frozenset({
    CONVOLUTION, "aten.conv1d", "aten.conv3d", "aten.conv_transpose1d", "aten.conv_transpose2d", "aten.conv_transpose3d",
    "aten.convolution", "aten._convolution",
})  # fmt: skip

PRODUCTS = CONVOLUTIONS | {
    f"aten.{name}"
    for name in (
        "addbmm", "addmm", "addmv", "baddbmm", "bilinear", "bmm", "chain_matmul", "dot", "einsum", "inner", "linear", "matmul",
        "mm", "mv", "scaled_dot_product_attention", "tensordot", "vdot",
    )
}  # fmt: skip
"""Operators that become products of libraries."""

SUITED = (torch.float32, torch.bool)
"""Dtypes of what they take: numbers and masks."""


def suits(program: ExportedProgram, level: Level | None) -> bool:
    """Whether to link our functions first: where they were measured to be as fast as torch's.  What they lack besides is only known
    when the code is linked, or when it runs; both are rare where this holds.  `level`: None for processors like this one."""
    patches = all(_is_patches(node) for node in _products(program) if _name(node) in CONVOLUTIONS)
    return fast(level) and patches and not lacking(program)


def fast(level: Level | None) -> bool:
    """Whether our products were measured beside torch's on such processors."""
    features = level.features if level is not None else processor_flags()
    return os.uname().machine == X86_64 and VECTORS in features


def lacking(program: ExportedProgram) -> str:
    """The first product that our functions cannot do, in words; "" where there is none."""
    for node in _products(program):
        others = [factor.dtype for factor in _factors(node) if factor.dtype not in SUITED]
        if others:
            return f"{_name(node)} of {str(others[0]).removeprefix('torch.')}"
        if _name(node) in CONVOLUTIONS and (_name(node) != CONVOLUTION or _arguments(node).get("groups", 1) != 1):
            return f"{_name(node)}{' with groups' if _name(node) == CONVOLUTION else ''}"
    return ""


def _products(program: ExportedProgram) -> Iterator[Node]:
    """Inside branches and loops too."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, GraphModule) else ():
            if _name(node) in PRODUCTS:
                yield node


def _name(node: Node) -> str:
    return str(getattr(node.target, "overloadpacket", ""))


def _factors(node: Node) -> list[torch.Tensor]:
    values = [leaf.meta.get("val") for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _arguments(node: Node) -> Mapping[str, Any]:
    """By name, those that are given."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_patches(node: Node) -> bool:
    """Whether a convolution cuts pictures into patches beside each other: no number is read twice."""
    arguments = _arguments(node)
    kernel = list(arguments["weight"].meta["val"].shape[2:])
    return kernel == _pair(arguments.get("stride", 1)) and _pair(arguments.get("padding", 0)) in ([0, 0], ["valid", "valid"])


def _pair(argument: Any) -> list[Any]:
    return [argument, argument] if isinstance(argument, int | str) else list(argument) * (2 // len(argument))
