"""Trials of values and sizes that no example has: an index out of range raises IndexError, wherever the tensors are.

On the CPU PyTorch raises it itself.  On a GPU a kernel asserts it, which ends the use of the GPU by the process: there the
operators that take positions are asked before they run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils._python_dispatch import TorchDispatchMode

from .tensor_places import CPU

FAILURES = (RuntimeError, LookupError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError)
"""What operators, and a model's own code, raise that do not take what they are tried with."""

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
def guarded_indices(device: torch.device, programs: Iterable[ExportedProgram] = ()) -> Iterator[None]:
    """Inside, an index out of range raises IndexError on `device`, and leaves the device as it was.

    Not where one of `programs`, those of the model that runs, has branches or loops.  PyTorch compiles these in eager mode too.
    That fails under a dispatch mode, and from then on without one (torch 2.11)."""
    if device.type == CPU.type or any(map(_calls_graphs, programs)):
        yield
        return
    with IndexGuard():
        yield


def _calls_graphs(program: ExportedProgram) -> bool:
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in program.graph.nodes)


class IndexGuard(TorchDispatchMode):
    """Asks every operator that takes positions, of tensors on any device."""

    supports_higher_order_operators = True  # their bodies are not asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func.namespace == "aten":
            _check(func, args, given)
        return func(*args, **given)


def _check(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = func._schema.name.partition("::")[2]
    if name not in KINDS:
        return
    names = [each.name for each in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if name in ASSERTED and not bool(given["self"].all()):
        raise RuntimeError(given.get("assert_msg", "an assertion of the model does not hold"))
    for positions, low, high, ignored in _ranges(name, given):
        if not isinstance(positions, torch.Tensor) or positions.dtype in (torch.bool, torch.uint8) or not positions.numel():
            continue
        asked = positions if ignored is None else positions[positions != ignored]
        if asked.numel() and not (low <= int(asked.min()) and int(asked.max()) < high):
            raise IndexError(f"{name}: an index is out of range, expected {low} to {high - 1}")


def _ranges(name: str, given: Mapping[str, Any]) -> Iterator[tuple[Any, int, int, int | None]]:
    """Positions, the lowest one, the end, and what is taken besides."""
    own = given.get("self")
    if name in LISTED:
        assert isinstance(own, torch.Tensor)
        axis = 0
        for positions in given["indices"]:
            masked = isinstance(positions, torch.Tensor) and positions.dtype in (torch.bool, torch.uint8)
            yield positions, -own.shape[axis], own.shape[axis], None
            axis += positions.dim() if masked else 1
    elif name in ROWS:
        yield given["indices"], 0, given["weight"].shape[0], None
    elif name in ALONG:
        assert isinstance(own, torch.Tensor)
        yield given["index"], 0, own.shape[given["dim"]] if own.dim() else 1, None
    elif name in FLAT:
        assert isinstance(own, torch.Tensor)
        yield given["index"], -own.numel(), own.numel(), None
    elif name in LABELS:
        assert isinstance(own, torch.Tensor)
        yield given["target"], 0, own.shape[min(1, own.dim() - 1)], given.get("ignore_index", -100)
    elif name in UNPOOLED:
        yield given["indices"], 0, int(torch.Size(given["output_size"]).numel()), None


KINDS = LISTED | ROWS | ALONG | FLAT | LABELS | UNPOOLED | ASSERTED
