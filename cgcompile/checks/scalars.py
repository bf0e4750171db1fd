"""Rules about numbers that Python reads from tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from cgbundle.format.schema import Finding

from ..model.side_effects import branch_fix
from ..model.user_code import place
from .context import HOST, NOTE, REFUSE, RuleContext, finding
from .host_placement import TENSOR_ASSERTIONS, depends, introduces_symbols

aten = torch.ops.aten

READS = (aten.item.default, aten._local_scalar_dense.default)
"""Operators of `.item()`, `int(x)`, `float(x)` and `.tolist()`, and of indexing by a tensor without dimensions."""

ASSERTIONS = (aten._assert_scalar.default, aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)

SELECTS = (aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.select_scatter.default, aten.slice_scatter.default)
"""Operators that take a number as an index or a bound."""


def host_scalar(context: RuleContext) -> Iterable[Finding]:
    """A number that Python reads from a tensor: `.item()`, `int(x)`, `float(x)`, `.tolist()`.

    What it looks for: `aten.item` and `aten._local_scalar_dense`, except for numbers that are only an index or a bound
    (data-dependent-select).
    Why CUDA forbids it: the CPU waits for the number.  A stream under capture cannot be synchronized, and a replay runs no CPU
    code.  ("Prohibited and Unhandled Operations" in the CUDA programming guide, error cudaErrorStreamCaptureUnsupported.)
    Effect: the read, and every operation that uses the number, run on the host, between two graphs.
    Fix: keep the number as a tensor of no dimensions: write `x * x.max()` instead of `x * x.max().item()`.
    Source: FORBIDDEN_CUDAGRAPH_OPS and get_first_incompatible_cudagraph_node in torch/_inductor/utils.py.
    """
    for node, top in context.calls():
        if node.target in READS and not selects(node):
            yield finding(
                "host-scalar", HOST, "the CPU reads a number out of a tensor and waits for the GPU", node, context.effect(top),
                "keep the number as a tensor of no dimensions: leave .item(), int() and float() out", top,
            )  # fmt: skip


def selects(node: Node) -> bool:
    """Returns whether a number is used only as an index or a bound."""
    users = [user for user in node.users if depends(user) or user.target not in ASSERTIONS]
    numbers = [user for user in users if not isinstance(user.target, torch._ops.OpOverload)]
    operators = [user for user in users if isinstance(user.target, torch._ops.OpOverload) and user.target not in ASSERTIONS]
    further = [user for number in numbers for user in number.users if user.target not in ASSERTIONS]
    return bool(operators or further) and all(user.target in SELECTS for user in [*operators, *further])


def assert_scalar(context: RuleContext) -> Iterable[Finding]:
    """An assertion about a number that depends on data.

    What it looks for: `aten._assert_scalar` and `aten.sym_constrain_range`.  Assertions at a line that reads the number, or creates
    a size that depends on data, are not reported, because another finding reports that line.
    Why CUDA forbids it: the CPU must read the number from the GPU and wait for it (host-scalar).
    Effect: none by itself: the assertion runs on the host with the number.
    Fix: none needed; `torch._assert_async` asserts in the graph, if the GPU is in this machine.
    Source: FORBIDDEN_CUDAGRAPH_OPS in torch/_inductor/utils.py names aten._assert_scalar.
    """
    seen = {place(node)[0] for node, _ in context.calls() if introduces_symbols(node)}
    for node, top in context.calls():
        if node.target in ASSERTIONS and any(depends(source) for source in node.all_input_nodes):
            note = finding(
                "assert-scalar", NOTE, "an assertion about a number that depends on data", node,
                "it is checked on the host, with the number", "torch._assert_async asserts on the GPU", top,
            )  # fmt: skip
            if note.where not in seen:
                seen.add(note.where)
                yield note


def tensor_assertion(context: RuleContext) -> Iterable[Finding]:
    """An assertion about a tensor, `torch._assert_async`, in a model that is cross-compiled.

    What it looks for: `aten._assert_async` outside of branches and loops.
    Why CUDA cares: Triton has no kernel for it, and a failing assertion on the GPU makes the GPU unusable for the process.
    Effect: the host checks it, between two graphs.
    Fix: remove it if it cannot fail.
    Source: TENSOR_ASSERTIONS in checks/host_placement.py.
    """
    for node, top in context.calls():
        if context.cross_compiled and node.target in TENSOR_ASSERTIONS and top == node.name:
            yield finding(
                "tensor-assertion", HOST, "an assertion about a tensor is checked on the CPU", node, context.effect(top),
                "remove it if it cannot fail",
            )  # fmt: skip


def asserted_value(context: RuleContext) -> Iterable[Finding]:
    """A branch or a shape that depends on data, where the model works with one value only: `if mask.any(): raise`.

    What it looks for: Python reads the value of a tensor during the export, and the model fails with every other value that was
    tried: the next lower and the next higher number, or the other branch.
    Why CUDA cares: torch.export records one path through Python.
    Effect: the host checks at every call that the value is that of the example inputs.  Another value is an error, as in PyTorch.
    Fix: none needed if calls have this value; otherwise see data-dependent-branch.
    Source: `past_branches` in export/torch_export.py.
    """
    for obstacle in context.obstacles("asserted-value"):
        yield finding(
            "asserted-value", NOTE, obstacle.message, obstacle, "a call with another value is an error", "none needed",
        )  # fmt: skip


def path(context: RuleContext) -> Iterable[Finding]:
    """Python that branches on the value of a tensor.  All paths are in the bundle.

    What it looks for: Python reads the truth value of a tensor during the export (`if`, `while`, `and`, `assert`, a comparison of
    `.item()`).
    Why CUDA cares: a graph is a fixed sequence of kernels, so every such test becomes a branch like torch.cond.
    Effect: the model is exported once for each path, and paths that reach the same Python state are joined.  Every path is compared
    with eager PyTorch.
    Fix: none needed.
    Source: export/paths.
    """
    for obstacle in context.obstacles("path"):
        yield finding("path", NOTE, obstacle.message, obstacle, "a branch of the program, like torch.cond", "none needed")


def baked_weight(context: RuleContext) -> Iterable[Finding]:
    """Python that reads the value of a weight: `if self.flag > 0`, `torch.arange(int(self.count))`, the time steps of a
    solver.

    What it looks for: Python reads a value during the export that depends only on parameters, constants, and buffers that no call
    writes to.
    Why CUDA cares: a graph is a fixed sequence of kernels, and the exported program depends on this value.
    Effect: the build computes the value.  An update of a loaded program cannot change these weights.
    Fix: none needed; for a weight that you want to update, compute with the tensor: torch.where, `x * self.scale`.
    Source: `KnownValues` in model/devices/known_values.py.
    """
    for obstacle in context.obstacles("baked-weight"):
        yield finding(
            "baked-weight", NOTE, obstacle.message, obstacle, "program.update refuses other values of it",
            "none needed; for a weight that you want to update, compute with the tensor (torch.where)",
        )  # fmt: skip


def data_dependent_branch(context: RuleContext) -> Iterable[Finding]:
    """Python that branches on the value of a tensor, if not all paths can be exported: `while error > bound:`, `range(int(n))`.

    What it looks for: Python reads the truth value or the number of a tensor during the export.  Either there are more paths than
    --max-paths, or a path cannot be exported.
    Why CUDA forbids it: a graph is a fixed sequence of kernels, and torch.export records one path through Python.
    Effect: no bundle can be built.  Other branches on data give notes: `path`, or `asserted-value` if one side fails.
    Fix: for a loop whose end depends on data (`range(int(n))`, `while`), use `torch.while_loop`, or `range(N)` with a `break`.  For
    a loop over selected elements (`for expert in hit.nonzero()`), loop over all elements, with weight 0 for those that are not
    selected.
    Source: torch.export refuses it as GuardOnDataDependentSymNode; export/paths.
    """
    for obstacle in context.obstacles("data-dependent-branch"):
        yield finding(
            "data-dependent-branch", REFUSE, obstacle.message, obstacle,
            "the bundle would hold only the path of the example inputs",
            branch_fix(obstacle.source, obstacle.message),
        )  # fmt: skip
