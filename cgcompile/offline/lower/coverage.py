"""Finds the operations of a program that have no Triton kernel, without lowering the program.  Each operation is decomposed
separately, as `retrace` decomposes a program.  Inductor's tables then show which of the resulting operators have a kernel.

Some of Inductor's lowerings have kernels only for some arguments and GPUs.  Such operations are lowered, each separately.

Private interfaces (torch 2.11, 2.13): `FakeTensorMode`, `make_fx`, the tables `lowerings` and `fallbacks` of
`torch._inductor.lowering`, and `_is_fallback_handler` of the functions in `lowerings`.
"""

from __future__ import annotations

import logging
import operator as python_operators
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch._inductor.lowering import fallbacks, lowerings
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from cgbundle.format.schema import Finding

from ...checks.context import REFUSE, computes, finding, operator
from ...checks.host_placement import TENSOR_ASSERTIONS
from ...checks.operators import WITHOUT_KERNEL
from ...errors import BuildError
from ...export.functionalization import functional
from ...export.higher_order.conditionals import bodies, is_conditional
from ...export.weights import weight_placeholders
from ...model.devices.markers import marker
from ...targets.architectures import Arch
from ..collectives import COLLECTIVE
from ..decompose.arguments import DEVICE
from ..decompose.complex_numbers import Pair, is_complex, run_on_pairs
from ..decompose.decompositions import decompositions, replacement
from ..decompose.device_program import ASSERTIONS, host_hint
from ..decompose.retrace import Retraced
from ..lowered import INPUT
from ..tuning.cost_model import choose
from .fake_device import fake_device
from .inductor import lower_graph

FREE = frozenset({torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.detach.default, torch.ops.aten.copy_.default})
"""Operators without an Inductor lowering, which retracing removes or replaces by a copy."""

CHOOSING = frozenset({"median", "nanmedian", "mode", "kthvalue", "scatter", "scatter_add", "scatter_reduce", "index_put"})
"""Further operators, besides the table `fallbacks`, whose lowering may call torch's operator (torch/_inductor/lowering.py,
2.13)."""


def operators_without_kernel(program: ExportedProgram, on_host: Collection[str], arch: Arch) -> tuple[Finding, ...]:
    """An operation without a Triton kernel, in a program that is cross-compiled.

    What it looks for: operations on the GPU that decompose into operations without an Inductor lowering, or into a fallback to
    torch's own operators.  Also operations on complex numbers that are not supported as pairs of real numbers, and complex
    inputs and outputs.
    Why: without the GPU no library can provide a kernel.
    Effect: the bundle cannot be cross-compiled.
    Fix: run it on the host (--fallback-op), build on a machine with this GPU, or use another operation.
    Source: `make_fallback` in torch/_inductor/lowering.py.
    """
    folded = _folded(program)
    with fake_device(arch), _quiet():
        unsupported = _without_kernel(program, on_host, arch, folded)
        hint = host_hint(_all_fallback_ops(program, on_host, arch, folded, unsupported)) if unsupported else ""
    return tuple([_finding(node, missing, hint) for node, missing in unsupported.items()])


def _without_kernel(program: ExportedProgram, on_host: Collection[str], arch: Arch, folded: Collection[Node]) -> dict[Node, str]:
    """The operations without a kernel, each with the operator that has none."""
    unsupported: dict[Node, str] = {}
    missing_by_form: dict[Any, str] = {}
    for node in _operations(program.graph_module, on_host):
        form = tuple([source in folded for source in (node, *node.all_input_nodes)]), _operation_key(node)
        if form not in missing_by_form:
            missing_by_form[form] = _missing(node, arch, folded, on_host)
        if missing_by_form[form]:
            unsupported[node] = missing_by_form[form]
    return unsupported | {node: "a complex result" for node in _complex_results(program.graph_module, on_host)}


def _all_fallback_ops(
    program: ExportedProgram, on_host: Collection[str], arch: Arch, folded: Collection[Node], unsupported: Collection[Node]
) -> list[str]:
    """The operators to keep on the host.  Each of them can leave further operators without a kernel, if complex numbers then pass
    between host and GPU."""
    names: dict[str, None] = {}
    host = set(on_host)
    while new := {_spelled(node): None for node in unsupported if _spelled(node) not in names}:
        names |= new
        host |= {node.name for node in program.graph.nodes if _spelled(node) in names}
        unsupported = _without_kernel(program, host, arch, folded)
    return list(names)


def _spelled(node: Node) -> str:
    return str(node.target).removesuffix(".default")


def _operations(module: GraphModule, on_host: Collection[str]) -> Iterator[Node]:
    """Yields the operations that need kernels, also those inside branches and loops."""
    for node in [node for node in module.graph.nodes if node.name not in on_host]:
        if is_conditional(node):
            for body in bodies(node, module):
                yield from _operations(body, ())
        elif _is_checked(node) or node.target in TENSOR_ASSERTIONS:
            yield node


def _complex_results(module: GraphModule, on_host: Collection[str]) -> Iterator[Node]:
    """Yields operations whose complex results are outputs or are read by the host."""
    for node in _operations(module, on_host):
        readers = [user for user in node.users if user.op == "output" or user.name in on_host]
        if readers and any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in tree_leaves(node.meta.get("val"))):
            yield node


@contextmanager
def _quiet() -> Iterator[None]:
    """Disables torch's logs of operations that cannot be traced separately."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(level)


def _folded(program: ExportedProgram) -> set[Node]:
    """The weights that do not change, and the operations that depend only on them and return a tensor. constant_folding.py folds
    these."""
    weights = weight_placeholders(program)
    written = set(functional(program).buffers_to_mutate.values())
    folded = {node for node in program.graph.nodes if node.name in weights and weights[node.name] not in written}
    for node in program.graph.nodes:
        if computes(node) and isinstance(node.meta.get("val"), torch.Tensor) and node.all_input_nodes:
            folded |= {node} if folded.issuperset(node.all_input_nodes) else set()
    return folded


def _finding(node: Node, missing: str, hint: str) -> Finding:
    name = operator(node)
    inside = "" if missing.removeprefix("aten.").partition(".")[0] == name else f" ({missing})"
    bare_finding = finding(
        WITHOUT_KERNEL, REFUSE, f"{name} has no Triton kernel{inside}", node, "without the GPU all is compiled by Triton", ""
    )
    return replace(bare_finding, fix=hint)


def _missing(node: Node, arch: Arch, known: Collection[Node], on_host: Collection[str]) -> str:
    """Returns the operator without a kernel that an operation decomposes into, or a reason, or "".  `known`: the result of
    `_folded`."""
    folded = node in known
    if node.target in TENSOR_ASSERTIONS:
        return operator(node)  # Inductor would drop a kernel that only asserts
    values = [leaf for source in node.all_input_nodes for leaf in tree_leaves(source.meta.get("val"))]
    if any(
        None in ([*map(_number, leaf.shape)] if isinstance(leaf, torch.Tensor) else [_number(leaf)])
        for leaf in values
        if leaf is not None
    ):
        return ""  # its sizes depend on data, so it runs on the host or is refused
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors: list[torch.Tensor] = []
    places: dict[Node, list[_Place]] = {}
    with mode:
        for source in node.all_input_nodes:
            values, _ = tree_flatten(source.meta.get("val"))
            places[source] = [
                _place(value, tensors, source in known or (source.op == "call_function" and source.name not in on_host))
                for value in values
            ]

    def run(*inputs: torch.Tensor) -> Any:
        def value(source: Node) -> Any:
            _, spec = tree_flatten(source.meta.get("val"))
            leaves = [place.of(inputs) for place in places[source]]
            return tree_unflatten(leaves, spec)

        args = map_aggregate(map_arg(node.args, value), _on_device)
        kwargs = map_aggregate(map_arg(node.kwargs, value), _on_device)
        if is_complex(node):
            output = run_on_pairs(node.target, args, kwargs)
            parts = [[leaf.real, leaf.imag] if isinstance(leaf, Pair) else leaf for leaf in tree_leaves(output)]
            return tuple([leaf for leaf in tree_leaves(parts) if isinstance(leaf, torch.Tensor)])
        function = replacement(node.target)
        output = function(*args, **kwargs) if function else NotImplemented
        output = node.target(*args, **kwargs) if output is NotImplemented else output
        return tuple([leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)])

    try:
        with mode, torch.no_grad():
            traced = make_fx(torch.func.functionalize(run, remove="mutations"), decomposition_table=decompositions())(*tensors)
    except (DynamicOutputShapeException, DataDependentOutputException):
        return ""  # other rules check operations that depend on data
    except BuildError as error:
        return str(error)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"it cannot be traced for a GPU: {type(error).__name__}"
    missing = next(_without_lowering(traced.graph, folded), "")
    if missing or folded or not any(_may_fall_back(node) for node in traced.graph.nodes):
        return missing
    names = tuple([(INPUT, str(index)) for index in range(len(tensors))])
    retraced = Retraced(graph=traced, tensors=tuple(tensors), names=names, written=(), mode=mode, program=traced)
    try:
        _, unknown = lower_graph(retraced, (), arch, (), choose)
    except BuildError as error:
        return str(error)
    return next(iter(unknown), "").removeprefix("torch.ops.").removesuffix(".default")


@dataclass(frozen=True, slots=True)
class _Place:
    """The positions of a value's tensors: one, or two for the parts of a complex value; none for a `number`."""

    positions: tuple[int, ...]
    number: Any = None

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        parts = [tensors[position] for position in self.positions]
        return self.number if not parts else parts[0] if len(parts) == 1 else Pair(*parts)


def _place(value: Any, tensors: list[torch.Tensor], computed: bool) -> _Place:
    """Appends fake tensors for a value to `tensors`: two for a complex value that kernels or the build computes (`computed`)."""
    if not isinstance(value, torch.Tensor):
        return _Place((), _number(value))
    shape, strides = [_number(size) for size in value.shape], [_number(stride) for stride in value.stride()]
    pair = computed and value.is_complex()
    dtype = value.dtype.to_real() if pair else value.dtype
    tensors += [torch.empty_strided(shape, strides, dtype=dtype, device=DEVICE) for _ in range(1 + pair)]
    return _Place(tuple(range(len(tensors) - 1 - pair, len(tensors))))


def _number(value: Any) -> Any:
    """The number that a symbolic size has for the example inputs."""
    return value.node.hint if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _on_device(value: Any) -> Any:
    return DEVICE if isinstance(value, torch.device) else value


def _without_lowering(graph: Graph, folded: bool) -> Iterator[str]:
    """Yields the operators of a decomposed graph that Inductor has no kernel for.  `folded`: yields only operators with several
    results, because the build computes all others."""
    for node in graph.nodes:
        if node.op != "call_function" or node.target is python_operators.getitem or not computes(node) or node.target in FREE:
            continue
        if folded and isinstance(node.meta.get("val"), torch.Tensor):
            continue
        values = [
            leaf for leaf in tree_leaves([node.meta.get("val"), [operand.meta.get("val") for operand in node.all_input_nodes]])
        ]
        unpaired = any(isinstance(leaf, torch.Tensor) and leaf.is_complex() for leaf in values)
        is_collective = node.target is COLLECTIVE  # becomes a launch of cgcompile's kernel
        if isinstance(node.target, torch._ops.OpOverload) and not is_collective and (unpaired or falls_back(node.target)):
            yield str(node.target).removesuffix(".default")


def _is_checked(node: Node) -> bool:
    """Whether an operation is checked: it is no assertion, no marker, and no operator with subgraphs."""
    alone = all(source.op != "get_attr" for source in node.all_input_nodes) and not marker(node)
    return computes(node) and isinstance(node.target, torch._ops.OpOverload) and node.target not in ASSERTIONS and alone


def _may_fall_back(node: Node) -> bool:
    return node.op == "call_function" and chooses(node.target)


def chooses(op: Any) -> bool:
    """Whether Inductor has a kernel for an operator with some arguments and GPUs, and calls torch's own operator for other
    arguments or GPUs."""
    name = str(op).partition(".")[2].partition(".")[0].rstrip("_")
    return name in CHOOSING or name in _names_of_fallbacks()


@cache
def _names_of_fallbacks() -> frozenset[str]:
    """Names without overloads and trailing underscores, because overloads and in-place variants share lowerings."""
    return frozenset([str(fallback).removeprefix("aten.").partition(".")[0].rstrip("_") for fallback in fallbacks])


def falls_back(op: torch._ops.OpOverload) -> bool:
    """Whether Inductor always calls torch's own operator."""
    lowered = lowerings.get(op)
    return lowered is None or getattr(lowered, "_is_fallback_handler", False)


def _operation_key(node: Node) -> Any:
    """Of the operations with equal keys, only one is checked."""

    def layout_of(source: Node) -> tuple[Any, ...]:
        return tuple(
            [
                (leaf.dtype, *map(_number, leaf.shape), *map(_number, leaf.stride())) if isinstance(leaf, torch.Tensor) else leaf
                for leaf in tree_leaves(source.meta.get("val"))
            ]
        )

    kinds = [source.op for source in node.all_input_nodes]
    return node.target, *kinds, repr(map_arg((node.args, node.kwargs), layout_of))
