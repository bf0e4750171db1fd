"""The kind of each node of an exported program, and properties of its operator that the partitioner uses.

Private interfaces (torch 2.11, 2.13): `free_unbacked_symbols` of `torch.fx.experimental.symbolic_shapes`, and the storage's
`_cdata`, which is equal for fake tensors that share memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..errors import ModelError
from ..export.higher_order.conditionals import CONTROL_FLOW, obstacle
from ..export.weights import WEIGHT_KINDS
from ..model.devices.markers import marker
from ..model.user_code import place

aten = torch.ops.aten


class NodeKind(Enum):
    """INPUT: a tensor of the call.  WEIGHT: a parameter, buffer or constant.  SUBMODULE: a module of a higher-order operator.

    NUMBER: a Python number that the sizes of the call determine.  DATA_DEPENDENT: a number that depends on data, or a tensor whose
    size does.  ASSERTION: a check of such values.  KNOWN_ASSERTION: a check that is decided when the bundle is built.  OPERATION:
    any other call.
    """

    INPUT = "input"
    WEIGHT = "weight"
    SUBMODULE = "submodule"
    NUMBER = "number"
    DATA_DEPENDENT = "data-dependent"
    ASSERTION = "assertion"
    KNOWN_ASSERTION = "known assertion"
    OPERATION = "operation"
    OUTPUT = "output"


SCALAR_CHECKS = (
    aten._assert_scalar.default,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
    torch.sym_constrain_range_for_size if hasattr(torch, "sym_constrain_range_for_size") else None,
)
"""Assertions about numbers."""

TENSOR_CHECKS = (aten._assert_tensor_metadata.default,)
"""Assertions about dtype, layout and device.  They are dropped: the signature guarantees them, and they fail on other devices."""

NodeKinds = dict[Node, NodeKind]


def node_kinds(program: ExportedProgram) -> NodeKinds:
    """Returns the kind of every node of `program.graph`.  Raises program-unsupported, data-dependent-output."""
    known: NodeKinds = {}
    kinds = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            spec = kinds[node.name]
            if spec.kind in WEIGHT_KINDS:
                known[node] = NodeKind.WEIGHT
            elif spec.kind is InputKind.USER_INPUT:
                known[node] = NodeKind.INPUT if isinstance(spec.arg, TensorArgument) else NodeKind.NUMBER
            else:
                raise ModelError("program-unsupported", f"input {node.name!r} of the program is of the kind {spec.kind.name}")
        elif node.op == "get_attr":
            known[node] = NodeKind.SUBMODULE
        elif node.op == "output":
            known[node] = NodeKind.OUTPUT
        else:
            known[node] = _of_call(node, known)
    for spec in program.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise ModelError("program-unsupported", f"output {spec.arg.name!r} of the program is of the kind {spec.kind.name}")
    for node in returned_nodes(program):
        if known[node] in (NodeKind.DATA_DEPENDENT, NodeKind.NUMBER):
            raise ModelError(
                "data-dependent-output",
                f"{_place(node) or 'model'}: the output {node.name!r} of the program is a number "
                "or has a size that depends on data",
            )
    return known


def returned_nodes(program: ExportedProgram) -> tuple[Node, ...]:
    """The nodes that the program returns, in order, with duplicates."""
    (node,) = [node for node in program.graph.nodes if node.op == "output"]
    return tuple([leaf for leaf in tree_leaves(node.args[0]) if isinstance(leaf, Node)])


def _place(node: Node) -> str:
    """Returns the user's source line from which a node comes, such as "model.py:12", or ""."""
    return place(node)[0]


def _of_call(node: Node, kinds: NodeKinds) -> NodeKind:
    if node.target in TENSOR_CHECKS:
        return NodeKind.KNOWN_ASSERTION
    if node.target in SCALAR_CHECKS:
        return (
            NodeKind.ASSERTION
            if any(kinds[source] is NodeKind.DATA_DEPENDENT for source in node.all_input_nodes)
            else NodeKind.KNOWN_ASSERTION
        )
    value = node.meta.get("val")
    if value is not None and unbacked(value):
        return NodeKind.DATA_DEPENDENT
    if isinstance(value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool):
        # an assertion can tell torch the value of a number from data; but it can fail, so the number still depends on data
        read = node.target is aten.item.default or any(kinds[source] is NodeKind.DATA_DEPENDENT for source in node.all_input_nodes)
        return NodeKind.DATA_DEPENDENT if read else NodeKind.NUMBER
    return NodeKind.OPERATION


def unbacked(value: Any) -> bool:
    """Whether a number depends on data, or the sizes or strides of a tensor do.  Storage offsets are not checked."""
    leaves = tree_leaves(value)
    sizes = [(*leaf.shape, *leaf.stride()) for leaf in leaves if isinstance(leaf, torch.Tensor) and _strided(leaf)]
    numbers = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)]
    return any(bool(free_unbacked_symbols(quantity)) for quantity in (*sizes, *numbers))


# --- kinds of operations --------------------------------------------------------------------------------------


def higher_order(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def inner_modules(node: Node, module: GraphModule) -> Iterator[GraphModule]:
    """Yields the modules of a higher-order operator, and the modules inside them."""
    for source in node.all_input_nodes:
        if source.op == "get_attr":
            submodule = getattr(module, str(source.target))
            if isinstance(submodule, GraphModule):
                yield submodule
                for inner in submodule.graph.nodes:
                    yield from inner_modules(inner, submodule)


def needs_host(node: Node, module: GraphModule) -> str:
    """Returns why an operation cannot be in a CUDA graph, even if no rule placed it on the host, or ""."""
    if marker(node) == "to_host":
        return "a copy to the host"
    if not higher_order(node):
        return ""
    if node.target.name() in CONTROL_FLOW:
        return obstacle(node, module)
    for submodule in inner_modules(node, module):
        for inner in submodule.graph.nodes:
            if marker(inner) == "to_host":
                return "a copy to the host inside it"
            if higher_order(inner) and inner.target.name() in CONTROL_FLOW:
                return "control flow inside it"
            if inner.op == "call_function" and unbacked(inner.meta.get("val")):
                return "a value inside it depends on data"
    return ""


def is_view(node: Node) -> bool:
    """Whether a node only makes a view of its first input.  A few such operators, such as reshape, may copy it instead."""
    return bool(getattr(node.target, "is_view", False)) and not writes_to(node)


def is_free(node: Node) -> bool:
    """Whether an operation costs nothing on either side: a view, an element of a list, a constant, a marker."""
    if node.target in (operator.getitem, aten.lift_fresh_copy.default) or marker(node) == "to_device":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    has_tensor_inputs = any(isinstance(source.meta.get("val"), torch.Tensor) for source in node.all_input_nodes)
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return is_view(node) or (not has_tensor_inputs and not random and isinstance(node.meta.get("val"), torch.Tensor))


NORMALIZATIONS = (aten.batch_norm.default, aten.instance_norm.default, aten.native_batch_norm.default)
"""If argument 5 is true, they write to the running statistics, arguments 3 and 4.  Their schemas do not declare these writes."""


def writes_to(node: Node) -> tuple[Node, ...]:
    """Returns the inputs that a node writes to, according to its schema.  `detach_`, which `torch.tensor()` leaves in a trace,
    changes only the autograd history and does not count."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is aten.detach_.default:
        return ()
    if node.target in NORMALIZATIONS:
        return tuple([value for value in node.args[3:5] if isinstance(value, Node) and node.args[5] is True])
    targets: list[Node] = []
    arguments = node.target._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    for argument, value in [
        *zip(positional, node.args, strict=False),
        *[(argument, node.kwargs[argument.name]) for argument in arguments if argument.name in node.kwargs],
    ]:
        if argument.alias_info is not None and argument.alias_info.is_write:
            targets += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Node)]
    return tuple(targets)


def storages(value: Any) -> Iterable[int]:
    """Returns identities of the storages of the fake tensors in a value."""
    return [leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if type(leaf).__name__ == "FakeTensor" and _strided(leaf)]


def _strided(value: torch.Tensor) -> bool:
    return value.layout is torch.strided
