"""Works around errors of Inductor, with passes over its graphs and with patches of its methods.

**Old values of inputs are read before a graph overwrites them.** A graph ends with copies of new values to the inputs that it
writes to.  Inductor removes operations that change nothing, copies too (`remove_noop_ops` in
torch/_inductor/fx_passes/post_grad.py).  Two swapped buffers then get the same value, because the second reads the first after the
write (torch 2.11 and 2.13).  The pass runs earlier.  It computes such values with an operation that Inductor does not remove: a
flip along no axis.

**A scatter of a number keeps its dtype.** Inductor turns it into `where(..., number, other number)`, whose dtype follows from the
Python numbers (torch 2.11, `scatter_upon_const_tensor` in fx_passes/joint_graph.py; 2.13 converts it).  A bfloat16 mask became
float32, a float32 mask int64.

**`Identity` of a number is the number.** `Identity` keeps sympy from expanding an index, but a number cannot be expanded.  `Max`
and `Min` reject `Identity` of a number, and quotients and remainders of it, because sympy cannot evaluate them.  Then Inductor did
not lower a gather at such an index (torch 2.11 and 2.13; pytorch pull request 172707 fixes the case of `Identity` alone).

**A factor of a sum is multiplied first.** `torch.add(x, a @ b, alpha=-1)` becomes `addmm` without its factor, because the pattern
ignores `alpha` (`addmm` in fx_passes/post_grad.py, torch 2.13).

**Short products are added by addmm.** Inductor generates one kernel for the sum of two products.  That kernel has no configuration
for inner axes of up to 16 elements.  If PyTorch's own kernels are excluded, no kernel is left to choose (`tuned_mm_plus_mm` in
torch/_inductor/kernel/mm_plus_mm.py, torch 2.11 and 2.13).

**Outputs are separate tensors.** Inductor merges equal operations.  Code that is compiled ahead of time then returns one tensor
twice, and its caller frees it twice (`generate_return` in torch/_inductor/codegen/cpp_wrapper_cpu.py, torch 2.11 and 2.13).

**Dtype rules are created once.** `DtypePropagationOpsHandler` is a singleton, but torch requests it for every operation of every
kernel.  Python calls `__init__` each time, which creates the rules of 200 operations (torch 2.11 and 2.13).  That took 5 % of the
time of lowering.

**Concatenations keep their strides.** Inductor leaves out tensors without elements.  If one tensor is left, the result is a copy
with the strides of that tensor, where `torch.cat` gives contiguous ones (`cat` in torch/_inductor/decomposition.py, torch 2.11 and
2.13).  A later view in the exported program may be impossible with those strides.

**Row indices of state are not checked against its size.** Inductor decomposes `_unsafe_index_put` to `index_put`, which checks them
(torch 2.11 and 2.13).  Programs whose state has a variable number of rows have their own check (state_rows.py).

Private interfaces (torch 2.11, 2.13): the options `post_grad_custom_pre_pass` and `joint_custom_pre_pass`, `CustomGraphPass`,
`get_hash_for_files`, `torch.utils._sympy.functions.Identity`, `torch._inductor.dtype_propagation.DtypePropagationOpsHandler`,
`torch._inductor.utils.op_dtype_propagation_rules`, `torch._inductor.decomposition.select_decomp_table` (returns a shared dict),
`torch._prims_common.suggest_memory_format`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]
import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler
from torch._inductor.utils import op_dtype_propagation_rules
from torch._prims_common import suggest_memory_format
from torch.fx import Graph, GraphModule, Node
from torch.utils._sympy.functions import Identity

aten = torch.ops.aten
COPY, PUT = aten.copy_.default, aten._unsafe_index_put.default

INPUTS = ("placeholder", "get_attr")
"""Kinds of nodes for the inputs of a graph.  In graphs that are compiled ahead of time for the CPU, buffers are attributes."""

SIMPLE = frozenset({
    "clone", "contiguous", "to", "_to_copy", "add", "sub", "mul", "div", "pow", "copy", "cat", "repeat", "where", "alias", "slice",
    "slice_scatter", "constant_pad_nd", "convert_element_type", "device_put", "ceil", "floor", "round", "trunc",
})  # fmt: skip
"""Operations that, like views, may change nothing.  That depends on their arguments."""


def passes(*, ahead: bool = False) -> dict[str, CustomGraphPass]:
    """Returns options of Inductor.  `ahead`: for code that is compiled ahead of time."""
    first = SeparateOutputs() if ahead else ReadOldValues()
    return {"post_grad_custom_pre_pass": first, "joint_custom_pre_pass": KeepScatteredDtypes()}


@contextmanager
def unchecked_puts(module: GraphModule) -> Iterator[None]:
    """Keeps Inductor from decomposing `aten._unsafe_index_put` inside the context, if the module contains it."""
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    table = select_decomp_table()
    with mock.patch.dict(table):
        if any(part.graph.find_nodes(op="call_function", target=PUT, sort=False) for part in parts):
            table.pop(PUT, None)
        yield


@contextmanager
def mended() -> Iterator[None]:
    """Patches Inductor inside the context: `Identity` of a number is the number, dtype rules are created once, and concatenations
    keep their strides."""
    table = select_decomp_table()
    concatenation = {aten.cat.default: partial(_with_strides_of_cat, table[aten.cat.default])}
    create, rule_counts = DtypePropagationOpsHandler.__init__, set[int]()

    def once(self: DtypePropagationOpsHandler) -> None:
        if (count := len(op_dtype_propagation_rules)) not in rule_counts:  # lowerings that are registered later add rules
            create(self)
            rule_counts.add(count)

    rules = mock.patch.object(DtypePropagationOpsHandler, "__init__", once)
    with mock.patch.object(Identity, "__new__", _identity), rules, mock.patch.dict(table, concatenation):
        yield


def _with_strides_of_cat(decomposition: Callable[..., Any], tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    result = decomposition(tensors, dim)
    if result is NotImplemented:
        return result
    formats = {suggest_memory_format(tensor) for tensor in tensors}
    return result.contiguous(memory_format=formats.pop() if len(formats) == 1 else torch.contiguous_format)


def _identity(kind: Any, value: Any) -> Any:
    return value if isinstance(value, sympy.Number) else sympy.Function.__new__(kind, value)


SHORT = 16
"""The smallest block of the inner axis in Inductor's kernel for a sum of two products.  The kernel needs a longer axis."""

KINDS: dict[torch.dtype, Callable[[Any], Any]] = {torch.bool: bool, torch.int64: int, torch.float32: float}
"""Python types of numbers from which `torch.where` derives a dtype."""


class ReadOldValues(CustomGraphPass):
    """The pass before Inductor's post-grad passes."""

    def __call__(self, graph: Graph) -> None:
        read_old_values(graph)
        spell_factors(graph)
        add_short_products(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


class SeparateOutputs(ReadOldValues):
    """The pass `ReadOldValues` for code that is compiled ahead of time.  It separates repeated outputs instead of adding short
    products."""

    def __call__(self, graph: Graph) -> None:
        read_old_values(graph)
        spell_factors(graph)
        separate_outputs(graph)


class KeepScatteredDtypes(CustomGraphPass):
    """The pass before Inductor's joint-graph passes."""

    def __call__(self, graph: Graph) -> None:
        keep_scattered_dtypes(graph)

    def uuid(self) -> Any:
        return get_hash_for_files((__file__,))


def keep_scattered_dtypes(graph: Graph) -> None:
    """Changes the graph in place.  Scattered numbers get the Python type of the required dtype.  If there is no such type, an
    identity operation keeps Inductor's pattern from matching."""
    for node in graph.find_nodes(op="call_function", target=aten.scatter.value):
        full, *place, value = node.args
        if full.target is not aten.full.default:
            continue
        shape, background = full.args
        kind = KINDS.get(full.meta["val"].dtype)
        if kind is not None and isinstance(value, int | float) and isinstance(background, int | float):
            full.args, node.args = (shape, kind(background)), (full, *place, kind(value))
        else:
            with graph.inserting_before(node):
                identity = graph.call_function(torch.ops.prims.rev.default, (full, []))
            identity.meta = {name: full.meta[name] for name in ("val", "tensor_meta") if name in full.meta}
            node.args = (identity, *place, value)


def spell_factors(graph: Graph) -> None:
    """Changes the graph in place: multiplies the second operand of a sum by its factor before the sum."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        factor, (_, added) = node.kwargs.get("alpha", 1), node.args
        if isinstance(factor, int | float) and factor == 1:
            continue
        if isinstance(added, Node):
            with graph.inserting_before(node):
                product = graph.call_function(aten.mul.Tensor, (added, factor))
            value = added.meta["val"]
            with value.fake_mode:
                product.meta["val"] = value * (factor.meta["val"] if isinstance(factor, Node) else factor)
        else:
            product = added * factor
        node.args, node.kwargs = (node.args[0], product), {}


def add_short_products(graph: Graph) -> None:
    """Changes the graph in place.  In a sum of two products, addmm computes the second one if its inner axis is short."""
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        one, other = node.args
        if any(not isinstance(operand, Node) or operand.target is not aten.mm.default for operand in (one, other)):
            continue
        inner = other.args[0].meta["val"].shape[1]
        if isinstance(inner, int) and inner <= SHORT and one.meta["val"].shape == other.meta["val"].shape:
            node.target, node.args = aten.addmm.default, (one, *other.args)


def separate_outputs(graph: Graph) -> None:
    """Changes the graph in place: computes a repeated output again, with an operation that Inductor does not remove."""
    output = graph.output_node()
    if isinstance(output.args[0], Node):  # the graph of a condition returns one tensor
        return
    results = list(output.args[0])
    for index, value in enumerate(results):
        if isinstance(value, Node) and value in results[:index] and isinstance(value.meta.get("val"), torch.Tensor):
            with graph.inserting_before(output):
                results[index] = graph.call_function(torch.ops.prims.rev.default, (value, []))
            results[index].meta = {name: value.meta[name] for name in ("val", "tensor_meta") if name in value.meta}
    output.args = (type(output.args[0])(results),)


def read_old_values(graph: Graph) -> None:
    """Changes the graph in place.  A value that is copied to an input may be another input, which an earlier copy overwrites.  Then
    the value is computed before the copies.  If inputs are attributes, a later copy counts too, because Inductor does not keep the
    order of copies to attributes."""
    copies = [node for node in graph.find_nodes(op="call_function", target=COPY) if node.args[0].op in INPUTS]
    written = {str(copy.args[0].target) for copy in copies if copy.args[0].op == "get_attr"}
    for copy in copies:
        destination, value = copy.args[:2]
        if simple_sources(value) & (written - {str(destination.target)}):
            first = next(node for node in graph.nodes if node.op != "placeholder")
            with graph.inserting_before(first) if value.op == "placeholder" else graph.inserting_after(value):
                identity = graph.call_function(torch.ops.prims.rev.default, (value, []))
            identity.meta = {name: value.meta[name] for name in ("val", "tensor_meta") if name in value.meta}
            copy.update_arg(1, identity)
        written.add(str(destination.target))


def simple_sources(value: Node) -> set[str]:
    """Returns the names of the inputs that a value may be equal to: only views and SIMPLE operations come between."""
    input_names: set[str] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        packet = getattr(node.target, "overloadpacket", None)
        view = getattr(node.target, "is_view", False) or node.target is operator.getitem
        if node.op in INPUTS:
            input_names.add(str(node.target))
        elif view or getattr(packet, "__name__", "") in SIMPLE:
            waiting += node.all_input_nodes
    return input_names
