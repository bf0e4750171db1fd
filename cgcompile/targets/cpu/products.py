"""Checks whether standalone.cpp supports a program's matrix products and convolutions, and whether it is as fast as libtorch."""

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
"""A flag in /proc/cpuinfo.  Without it, and on other architectures, the speed was not compared with that of libtorch."""

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
"""Operators that libraries compute as matrix products."""

SUITED = (torch.float32, torch.bool)
"""Supported dtypes of operands: values and masks."""


def suits(program: ExportedProgram, level: Level | None) -> bool:
    """Whether to try the functions of standalone.cpp before libtorch's.  They must be `fast`, and support all products;
    convolutions must be over patches.  Other missing functions are detected when the code is linked or runs.  `level`: None for
    this processor."""
    patches = all(_is_patches(node) for node in _products(program) if _name(node) in CONVOLUTIONS)
    return fast(level) and patches and not lacking(program)


def fast(level: Level | None) -> bool:
    """Whether these functions were measured to be fast on such processors."""
    features = level.features if level is not None else processor_flags()
    return os.uname().machine == X86_64 and VECTORS in features


def lacking(program: ExportedProgram) -> str:
    """Returns a description of the first product that standalone.cpp does not support, or ""."""
    for node in _products(program):
        others = [factor.dtype for factor in _factors(node) if factor.dtype not in SUITED]
        if others:
            return f"{_name(node)} of {str(others[0]).removeprefix('torch.')}"
        if _name(node) in CONVOLUTIONS and (_name(node) != CONVOLUTION or _arguments(node).get("groups", 1) != 1):
            return f"{_name(node)}{' with groups' if _name(node) == CONVOLUTION else ''}"
    return ""


def _products(program: ExportedProgram) -> Iterator[Node]:
    """Yields the products of a program, also those inside branches and loops."""
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
    """Returns the arguments that a call passes, by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _is_patches(node: Node) -> bool:
    """Whether a convolution cuts images into adjacent patches, so that it reads no element twice."""
    arguments = _arguments(node)
    kernel = list(arguments["weight"].meta["val"].shape[2:])
    return kernel == _pair(arguments.get("stride", 1)) and _pair(arguments.get("padding", 0)) in ([0, 0], ["valid", "valid"])


def _pair(argument: Any) -> list[Any]:
    return [argument, argument] if isinstance(argument, int | str) else list(argument) * (2 // len(argument))
