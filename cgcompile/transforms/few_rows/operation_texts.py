"""Triton's names of dtypes, and its expressions for elementwise operations."""

from __future__ import annotations

import torch

from .places import HALF

aten, prims = torch.ops.aten, torch.ops.prims

DTYPES = {
    torch.float32: "tl.float32", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.int64: "tl.int64",
    torch.int32: "tl.int32", torch.bool: "tl.int1",
}  # fmt: skip

RESHAPES = {
    aten.expand.default, aten.reshape.default, aten.squeeze.dim, aten.unsqueeze.default, aten.view.default,
    prims.inductor_force_stride_order.default,
}  # fmt: skip

TEXTS = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})", "neg": "(-{})", "exp": "tl.exp({})",
    "gt": "({} > {})", "ge": "({} >= {})", "lt": "({} < {})", "le": "({} <= {})", "eq": "({} == {})", "ne": "({} != {})",
    "bitwise_and": "({} & {})", "bitwise_or": "({} | {})", "logical_and": "({} & {})", "logical_or": "({} | {})",
    "logical_not": "({} == 0)",
    "maximum": "tl.maximum({}, {}, tl.PropagateNan.ALL)", "minimum": "tl.minimum({}, {}, tl.PropagateNan.ALL)",
    "where": "tl.where({}, {}, {})",
}  # fmt: skip

ROUNDED = ("add", "sub", "mul", "div", "exp")


def power(number: int) -> int:
    """Returns the smallest power of two that is not less than `number`."""
    return 1 << (number - 1).bit_length()


def rounded(text: str, dtype: torch.dtype) -> str:
    """Rounds an expression to half precision, and converts it back to float32.  Leaves other dtypes unchanged."""
    return f"{text}.to({DTYPES[dtype]}).to(tl.float32)" if dtype in HALF else text
