"""Raises IndexError for an index out of range on any device.  Trial calls of a build may have such indices, because their values or
sizes differ from those of all examples.

PyTorch raises the error on the CPU.  On a GPU a kernel asserts instead, which makes the GPU unusable for the process.  So the
indices are checked before the operator runs.
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
"""Exceptions of operators and of the model's code for values that they do not support."""

VALUELESS = (FakeTensor, FunctionalTensor)
"""Traced tensors, which have a shape and no values."""

LISTED = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})
"""Operators with a list of index tensors, one for each leading axis.  Negative indices count from the end."""

ROWS = frozenset({"embedding", "_embedding_bag", "_embedding_bag_forward_only"})
"""Operators with indices of rows of `weight`."""

ALONG = frozenset({
    "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select",
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_reduce", "index_reduce_",
})  # fmt: skip
"""Operators with indices `index` along the axis `dim`."""

FLAT = frozenset({"take", "put", "put_"})
"""Operators with indices `index` of the flattened tensor.  Negative indices count from the end."""

LABELS = frozenset({"nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss2d", "nll_loss_nd"})
"""Operators with classes `target`, which index axis 1 of `self`.  `ignore_index` is allowed too."""

UNPOOLED = frozenset({"max_unpool2d", "max_unpool3d"})
"""Operators with indices `indices` into an image of `output_size`."""

ASSERTED = frozenset({"_assert_async"})
"""Operators that assert that all elements of `self` are true."""


@contextmanager
def guarded_indices(device: torch.device) -> Iterator[None]:
    """Raises IndexError for an index out of range on `device` inside this context, and keeps the device usable."""
    if device.type == CPU.type:
        yield
        return
    with IndexGuard():
        yield


class IndexGuard(TorchDispatchMode):
    """Checks every operator with indices, on tensors of any device, before it runs."""

    supports_higher_order_operators = True  # such operators run, but their bodies are not checked

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets torch compile branches, loops and flex_attention in eager mode.  They fail under a mode without this method.  After
        such a failure they fail without a mode too (torch 2.11, 2.13)."""
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
    if any(isinstance(value, VALUELESS) for value in tree_leaves(operands)):  # traced: no values to check
        return
    if name in ASSERTED and not bool(operands["self"].all()):
        raise RuntimeError(operands.get("assert_msg", "an assertion of the model does not hold"))
    for positions, low, high, ignored in _ranges(name, operands):
        if not isinstance(positions, torch.Tensor) or positions.dtype in (torch.bool, torch.uint8) or not positions.numel():
            continue
        checked = positions if ignored is None else positions[positions != ignored]
        if checked.numel() and not (low <= int(checked.min()) and int(checked.max()) < high):
            raise IndexError(f"{name}: an index is out of range, expected {low} to {high - 1}")


def _ranges(name: str, operands: Mapping[str, Any]) -> Iterator[tuple[Any, int, int, int | None]]:
    """Yields index tensors, with the lowest index, the end of the range, and the ignored index."""
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
