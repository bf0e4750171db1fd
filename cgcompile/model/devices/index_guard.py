"""Trials of values and sizes that no example has: an index out of range raises IndexError, wherever the tensors are.

On the CPU PyTorch raises it itself.  On a GPU a kernel asserts it, which ends the use of the GPU by the process: there the
operators that take positions are asked before they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .tensor_places import CPU

FAILURES = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError)
"""What operators, and a model's own code, raise that do not take what they are tried with."""

VALUELESS = (FakeTensor, FunctionalTensor)
"""Tensors of a trace, which have a shape and no values."""

LISTED = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})
"""Take a list of positions, one for each of the first axes; from the end too."""

ROWS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})
"""Take positions of rows of `weight`."""

ALONG = frozenset({
    "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select",
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce", "index_reduce_",
})  # fmt: skip
"""Take positions `index` along the axis `dim`."""

FLAT = frozenset({"take", "put", "put_"})
"""Take positions `index` among all elements; from the end too."""

LABELS = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd"})
"""Take classes `target`, which are positions along axis 1 of `self`; `ignore_index` besides."""

UNPOOLED = frozenset({"max_unpool2d", "max_unpool3d"})
"""Take positions `indices` in a picture of `output_size`."""

ASSERTED = frozenset({"_assert_async"})
"""Assert that `self` holds."""


@contextmanager
def guarded_indices(device: torch.device) -> Iterator[None]:
    """Inside, an index out of range raises IndexError on `device`, and leaves the device as it was."""
    if device.type == CPU.type:
        yield
        return
    with IndexGuard():
        yield


class IndexGuard(TorchDispatchMode):
    """Asks every operator that takes positions, of tensors on any device."""

    supports_higher_order_operators = True  # their bodies are not asked

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Branches, loops and flex_attention compile themselves in eager mode.  Under a mode that does not say this, they fail, and
        from then on without a mode too (torch 2.11, 2.13)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        keywords = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            _check(func, args, keywords)
        return func(*args, **keywords)


def _check(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = func._schema.name.partition("::")[2]
    if name not in KINDS:
        return
    names = [argument.name for argument in func._schema.arguments]
    operands = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(isinstance(value, VALUELESS) for value in tree_leaves(operands)):  # a trial may trace
        return
    if name in ASSERTED and not bool(operands["self"].all()):
        raise RuntimeError(operands.get("assert_msg", "an assertion of the model does not hold"))
    for positions, low, high, ignored in _ranges(name, operands):
        if not isinstance(positions, torch.Tensor) or positions.dtype in (torch.bool, torch.uint8) or not positions.numel():
            continue
        asked = positions if ignored is None else positions[positions != ignored]
        if asked.numel() and not (low <= int(asked.min()) and int(asked.max()) < high):
            raise IndexError(f"{name}: an index is out of range, expected {low} to {high - 1}")


def _ranges(name: str, operands: Mapping[str, Any]) -> Iterator[tuple[Any, int, int, int | None]]:
    """Positions, the lowest one, the end, and what is taken besides."""
    tensor = operands.get("self")
    if name in LISTED:
        assert isinstance(tensor, torch.Tensor)
        axis = 0
        for positions in operands["indices"]:
            masked = isinstance(positions, torch.Tensor) and positions.dtype in (torch.bool, torch.uint8)
            yield positions, -tensor.shape[axis], tensor.shape[axis], None
            axis += positions.dim() if masked else 1
    elif name in ROWS:
        yield operands["indices"], 0, operands["weight"].shape[0], None
    elif name in ALONG:
        assert isinstance(tensor, torch.Tensor)
        yield operands["index"], 0, tensor.shape[operands["dim"]] if tensor.dim() else 1, None
    elif name in FLAT:
        assert isinstance(tensor, torch.Tensor)
        yield operands["index"], -tensor.numel(), tensor.numel(), None
    elif name in LABELS:
        assert isinstance(tensor, torch.Tensor)
        yield operands["target"], 0, tensor.shape[min(1, tensor.dim() - 1)], operands.get("ignore_index", -100)
    elif name in UNPOOLED:
        yield operands["indices"], 0, int(torch.Size(operands["output_size"]).numel()), None


KINDS = LISTED | ROWS | ALONG | FLAT | LABELS | UNPOOLED | ASSERTED
