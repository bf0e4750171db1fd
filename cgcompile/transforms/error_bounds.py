"""The allowed difference from eager PyTorch, for outputs and for everything that a call changes.  Integers and booleans must be
equal.  The bound of a float is that of its dtype, or of the coarsest floating dtype among the operations that compute it: float32
logits may have been rounded to bfloat16 before.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from cgbundle.format.schema import Weight

from ..export.programs import Programs
from ..model.flat_module import PREFIX
from ..model.pytree import dtype_name
from ..util.tolerance import is_float, tolerance
from .prepared import Prepared

Dtypes = set[torch.dtype]

FLOAT8 = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
"""These dtypes only store values: reads of them are exact, and sums over them use a wider dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBound:
    """The largest allowed `comparison.difference` of one tensor.  `title`: its name, as in `self_test_tensors`.

    `rounded`: the tensor depends on computed floats, so rounding can change an integer.  `widened`: the bound before eager
    PyTorch's own differences increased it; 0 if they did not.
    """

    title: str
    bound: float
    exact: bool
    rounded: bool
    widened: float = 0.0


def error_bounds(prepared: Prepared, weights: Sequence[Weight] = ()) -> tuple[ErrorBound, ...]:
    """Returns the bounds in the order of `self_test_tensors`: outputs, written inputs, and the state among `weights`, whose names
    may be the program's or the user's.  With several programs, the largest bounds count.

    Eager PyTorch itself is inexact: on a GPU it may round float32 to TF32, and outputs differ by `Prepared.spread` between
    runs.  A bound is at least SPREADS times the spread, but the spread increases no bound above MOST.
    """
    by_program = [_program_bounds(program, prepared, weights) for _, program in prepared.programs.distinct]
    bounds = tuple([_widest(candidates) for candidates in zip(*by_program, strict=True)])
    if prepared.on_gpu:
        bounds = _on_gpu(bounds, prepared.programs)
    spread = (*prepared.spread, *[0.0] * (len(bounds) - len(prepared.spread)))
    return tuple([_spread_out(bound, error) for bound, error in zip(bounds, spread, strict=True)])


SPREADS, MOST = 4.0, tolerance(torch.bfloat16)
"""Eager PyTorch's own difference is measured with few inputs.  Above MOST a comparison has no meaning, and the model should be
built in a wider dtype."""


def _spread_out(bound: ErrorBound, spread: float) -> ErrorBound:
    minimum = min(SPREADS * spread, MOST)
    return bound if bound.exact or minimum <= bound.bound else replace(bound, bound=minimum, widened=bound.bound)


def _on_gpu(bounds: Sequence[ErrorBound], programs: Programs) -> tuple[ErrorBound, ...]:
    """Returns the bounds if eager PyTorch runs on a GPU, which may round float32 to TF32."""
    tf32 = _rounds_to_tf32(programs)
    return tuple([replace(limit, bound=max(limit.bound, TF32)) if tf32 and limit.bound >= FLOAT32 else limit for limit in bounds])


def _rounds_to_tf32(programs: Programs) -> bool:
    nodes = [node for _, program in programs.distinct for node in program.graph.nodes]
    convolves = any(isinstance(node.target, torch._ops.OpOverload) and node.target.name() in _CUDNN for node in nodes)
    return torch.backends.cuda.matmul.allow_tf32 or (convolves and torch.backends.cudnn.allow_tf32)


def selection_floor(prepared: Prepared, bounds: Sequence[ErrorBound]) -> float:
    """Returns the smallest bound for floats from which an index is selected: the largest of the widened `bounds`, and of TF32 if
    eager PyTorch rounds to it."""
    widened = max((limit.bound for limit in bounds if limit.widened), default=0.0)
    return max(widened, TF32 if prepared.on_gpu and _rounds_to_tf32(prepared.programs) else 0.0)


FLOAT32 = tolerance(torch.float32)

TF32 = 5e-3
"""The bound if eager PyTorch rounds float32 operands to TF32 (10 bits of mantissa, 5e-4), but the lowered kernels may not.  cuDNN
rounds by default.  Measured: 3.8e-4 (a ViT's patches), 4.4e-4 (an LSTM), 2.8e-3 (a BiT)."""

_CUDNN = frozenset(
    f"aten::{name}"
    for name in (
        "conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding",
        "convolution", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input",
        "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input",
    )
)  # fmt: skip


def _widest(bounds: Sequence[ErrorBound]) -> ErrorBound:
    first = bounds[0]
    return replace(first, bound=max(limit.bound for limit in bounds), rounded=any(bound.rounded for bound in bounds))


def _program_bounds(program: ExportedProgram, prepared: Prepared, weights: Sequence[Weight]) -> tuple[ErrorBound, ...]:
    lineage = _Lineage(program)
    graph, signature = program.graph, prepared.signature
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    users = [placeholders[name] for name in program.graph_signature.user_inputs if name in placeholders]
    returned = tree_leaves(graph.output_node().args)[-len(signature.outputs) :]
    buffers = {name.removeprefix(PREFIX): placeholders[node] for node, name in program.graph_signature.inputs_to_buffers.items()}
    bounds = [
        _bound(f"output {spec.name}", spec.dtype, lineage.of(node)) for spec, node in zip(signature.outputs, returned, strict=True)
    ]
    for index in prepared.written:
        spec = signature.inputs[index]
        bounds.append(_bound(f"input {spec.name}", spec.dtype, lineage.of(users[index])))
    state = [(row.name.removeprefix(PREFIX), row.dtype) for row in weights if row.memory == "state"]
    return tuple([*bounds, *[_bound(f"state {name}", dtype, lineage.of(buffers.get(name))) for name, dtype in state]])


def _bound(name: str, dtype: str, passed: Dtypes) -> ErrorBound:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    exact = not is_float(torch_dtype)
    bound = 0.0 if exact else max(map(tolerance, {torch_dtype, *(passed - FLOAT8)}))
    return ErrorBound(title=f"{name} ({dtype_name(torch_dtype)})", bound=bound, exact=exact, rounded=bool(passed))


class _Lineage:
    """For every node, the floating dtypes of the operations that compute it.  A tensor, its views and values written to it share
    them."""

    def __init__(self, program: ExportedProgram) -> None:
        self._base: dict[Node, Node] = {}
        self._dtypes: dict[Node, Dtypes] = {}
        modules = dict(program.graph_module.named_modules())
        for node in program.graph.nodes:
            if node.op == "get_attr" and isinstance(modules.get(str(node.target)), GraphModule):
                self._dtypes[node] = _computed(modules[str(node.target)])
            elif node.op == "call_function":
                self._follow(node)
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        owners: Mapping[str, str] = {name: node for node, name in program.graph_signature.inputs_to_buffers.items()}
        leaves = tree_leaves(program.graph.output_node().args)
        for spec, leaf in zip(program.graph_signature.output_specs, leaves, strict=True):
            if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION) and spec.target:
                self._add(placeholders[owners.get(spec.target, spec.target)], self.of(leaf))

    def of(self, node: object) -> Dtypes:
        """Returns the floating dtypes of the operations that compute a node."""
        return self._dtypes.get(self._root(node), set()) if isinstance(node, Node) else set()

    def _follow(self, node: Node) -> None:
        passed: Dtypes = set().union(*[self.of(operand) for operand in node.all_input_nodes])
        viewed = _viewed(node)
        written = _write_targets(node)
        if viewed is not None:
            self._base[node] = self._root(viewed)
        if viewed is None or written:
            passed |= _floats(node.meta.get("val"))
        self._add(node, passed)
        for destination in written:
            self._add(destination, passed | _floats(destination.meta.get("val")))

    def _add(self, node: Node, dtypes: Dtypes) -> None:
        self._dtypes.setdefault(self._root(node), set()).update(dtypes)

    def _root(self, node: Node) -> Node:
        return self._base.get(node, node)


def _computed(module: GraphModule) -> Dtypes:
    """Returns the dtypes of the operations inside a higher-order operator."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    return set().union(*[_floats(node.meta.get("val")) for graph in graphs for node in graph.nodes if node.op == "call_function"])


def _viewed(node: Node) -> Node | None:
    """Returns the operand that the node's result is a view of, or that the node writes to; None if the result is computed.  A
    conversion is a computation, although its schema declares a view."""
    if node.target is operator.getitem:
        return node.all_input_nodes[0]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    schema = node.target._schema
    if not any(returned.alias_info for returned in schema.returns):
        return None
    for argument, value in zip(schema.arguments, node.args, strict=False):
        if argument.alias_info and isinstance(value, Node):
            kinds = [getattr(tensor_node.meta.get("val"), "dtype", None) for tensor_node in (node, value)]
            return value if kinds[0] in (None, kinds[1]) else None
    return None


def _write_targets(node: Node) -> list[Node]:
    """Returns the tensors that a node writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    destinations: list[Node] = []
    for position, argument in enumerate(node.target._schema.arguments):
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info and argument.alias_info.is_write:
            destinations += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]
    return destinations


def _floats(value: object) -> Dtypes:
    return {leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and is_float(leaf.dtype)}
