"""Finds the functional form of a program.  Its signature lists the buffers and inputs that the program writes to.

Private interfaces of torch.export.exported_program (2.11, 2.13): `_split_decomp_table_to_cia_and_python_decomp`, which is patched
temporarily, `_special_op_to_preserve_cia`, `_is_preservable_cia_op`.  If one is missing, functionalization is only slower.
`torch.fx.experimental.symbolic_shapes.free_unbacked_symbols`; `torch._C._dispatch_has_kernel_for_dispatch_key`, as in
tools/operators.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature, exported_program
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from ..errors import ModelError
from ..model.flat_module import PREFIX
from ..model.side_effects import SIZE_FIX
from ..model.tracing.attributes import ATTRIBUTE_FIX
from ..model.user_code import called_from, first_line, place
from .higher_order.refused_bodies import WRITES_FIX, written_operand
from .torch_program import arguments, without_weights
from .weights import weight_placeholders, weight_tensors

RNG_STATE = frozenset({"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"})
"""Higher-order operators that save and restore the state of a random number generator."""


def functional(program: ExportedProgram) -> ExportGraphSignature:
    """Returns the signature of a program's functional form, which lists mutated buffers and inputs.

    torch.export leaves writes in the graph as in-place operators.  `run_decompositions` makes them outputs, but traces the program
    again, as slowly as the export.  So the signature is derived from the graph if all writes are to buffers, inputs or new tensors.
    torch cannot functionalize a program that saves states of random generators.  For such a program, which the rule
    rng-state-operation refuses, returns the signature unchanged.

    Raises state-changed, state-shared, data-dependent-shape, export-failed."""
    parts = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    if any(keeps_rng_state(node) for part in parts for node in part.graph.nodes):
        return program.graph_signature
    writes = _direct_writes(program, parts)
    if writes is not None:
        return _with_writes(program.graph_signature, writes)
    if any(node.target is torch.ops.aten.lstm.input for part in parts for node in part.graph.nodes):
        # on CUDA, torch before 2.13 decomposes this operator to states with an extra axis (pytorch issue 151200)
        program = without_weights(program)
    try:
        with _other_operators_left_alone(parts):
            return program.run_decompositions({}).graph_signature
    except Exception as error:
        if where := _written_constant(program) or ("model" if "register it as buffer" in str(error) else ""):  # torch's text
            raise ModelError(
                "state-changed",
                f"{where}: forward() writes to a tensor in an attribute, which is not a buffer",
                f"{ATTRIBUTE_FIX}; let inputs() give a cache of transformers as an argument",
            ) from error
        if shared := _shared_buffers(program):
            raise ModelError(
                "state-shared",
                f"model: the buffers {shared[0]!r} and {shared[1]!r} share memory, and torch.export cannot follow writes to them",
                "give each a tensor of its own",
            ) from error
        if where := size_from_a_float(program):
            raise ModelError("data-dependent-shape", f"{where}: the size of a tensor depends on data") from error
        if where := size_in(program, error):
            raise ModelError("data-dependent-shape", where, SIZE_FIX) from error
        where, operator = written_operand(program.graph_module)
        if operator:
            raise ModelError(
                "export-failed",
                f"{where or 'model'}: a body of {operator} writes to an operand, which torch.export cannot make functional",
                WRITES_FIX,
            ) from error
        raise ModelError(
            "export-failed",
            f"model: torch.export cannot make the program functional: {type(error).__name__}: {first_line(error)}",
            "remove torch.no_grad and torch.set_grad_enabled from forward(): a bundle computes no gradients",
        ) from error


def functional_form(program: ExportedProgram) -> ExportedProgram:
    """Returns the program with mutated buffers and inputs as outputs.  Raises torch's errors, which `functional` would convert."""
    parts = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    with _other_operators_left_alone(parts):
        return program.run_decompositions({})


def _only_reads(node: Node) -> bool:
    """Whether a node certainly writes to no tensor, and has no size that depends on data, since a trace of it may fail.  False for
    custom operators, and for operators that call a graph."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr", "output")
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return getattr(operator, "__module__", "") in ("_operator", "math")
    if operator.namespace not in ("aten", "prims") or operator._schema.is_mutable or _sized_by_data(node):
        return False
    operands = arguments(node)
    return not any(name in operands for name in UNANNOUNCED) or operands.get("training", operands.get("use_input_stats")) is False


def _direct_writes(program: ExportedProgram, parts: Sequence[GraphModule]) -> dict[Node, str] | None:
    """Returns {operator node: placeholder name of the buffer or input that it writes to}, or None if that needs a trace: for writes
    to views or unknown values, in branches and loops, and by operators whose schemas may miss writes."""
    plain = program.graph_signature
    placeholders = {*plain.inputs_to_buffers, *plain.user_inputs}
    targets: dict[Node, str] = {}
    fresh_nodes: set[Node] = set()  # operators that write to a new tensor and return it
    for part in parts:
        for node in part.graph.nodes:
            if _only_reads(node) or _calls_graphs(node) or _reads_by_schema(node):
                continue
            if part is not program.graph_module or not _writes_in_place(node):
                return None
            for name, operand in arguments(node).items():
                if not _writes(node.target, name):
                    continue
                if isinstance(operand, Node) and (operand in fresh_nodes or _makes_new(operand)):
                    fresh_nodes.add(node)
                else:
                    # the result of an earlier write is the tensor that it wrote to
                    target = targets.get(operand, operand.name) if isinstance(operand, Node) else ""
                    if target not in placeholders or node in targets:
                        return None
                    targets[node] = target
    if fresh_nodes & targets.keys():  # it is unknown which of its two targets such an operator returns
        return None
    return None if _some_share_memory(program, {*targets.values()}) else targets


def _some_share_memory(program: ExportedProgram, written: Set[str]) -> bool:
    """Whether a weight that the program writes to shares memory with another weight.  `written`: placeholder names.  Weights that
    are only read may share memory: a language model's embedding is often also the weight of its last layer."""
    if not written:
        return False
    dense = {name: tensor for name, tensor in weight_tensors(program).items() if tensor.layout is torch.strided}
    names = weight_placeholders(program)
    storages = {placeholder: dense[name].untyped_storage() for placeholder, name in names.items() if name in dense}
    users = Counter([storage.data_ptr() for storage in storages.values() if storage.nbytes()])
    return any(users[storages[placeholder].data_ptr()] > 1 for placeholder in storages.keys() & written)


def _makes_new(node: Node) -> bool:
    """Whether a node certainly returns a tensor that shares memory with no other.

    Schemas declare views, except for composite operators: `dropout` returns its input itself if it is inactive.
    """
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten" or not _only_reads(node):
        return False
    declared = operator in NEW or not _is_composite(operator)
    return declared and all(result.alias_info is None for result in operator._schema.returns)


NEW = frozenset(
    {
        torch.ops.aten.linear.default, torch.ops.aten.matmul.default, torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default,
        torch.ops.aten.conv3d.default, torch.ops.aten.batch_norm.default,
    }
)  # fmt: skip
"""Composite operators that always return a new tensor.  Models write to it, as in `relu(inplace=True)` after a convolution."""


def _with_writes(signature: ExportGraphSignature, writes: Mapping[Node, str]) -> ExportGraphSignature:
    """Returns the signature with an output for each written buffer or input, as in the functional form: the last node that writes
    to it."""
    mutations = []
    for placeholder, node in {placeholder: node for node, placeholder in writes.items()}.items():
        buffer = signature.inputs_to_buffers.get(placeholder)
        kind = OutputKind.BUFFER_MUTATION if buffer else OutputKind.USER_INPUT_MUTATION
        mutations.append(OutputSpec(kind=kind, arg=TensorArgument(name=node.name), target=buffer or placeholder))
    return ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=[*mutations, *signature.output_specs])


def _calls_graphs(node: Node) -> bool:
    """Whether a node is a branch or a loop, whose bodies are graphs of the program."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in ("cond", "while_loop")


def _reads_by_schema(node: Node) -> bool:
    """Whether a node is a custom operator whose schema has no writes.  A trace does not look inside it, so the schema is enough."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace in ("aten", "prims"):
        return False
    return not _is_composite(operator) and not operator._schema.is_mutable and not _sized_by_data(node)


def _is_composite(operator: torch._ops.OpOverload) -> bool:
    """Whether torch implements an operator with other operators, so that a trace sees those."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def _writes_in_place(node: Node) -> bool:
    """Whether a node is an aten operator that writes only to arguments that its schema marks, and does not change their shapes."""
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload) or operator.namespace != "aten" or not operator._schema.is_mutable:
        return False
    plain = torch.Tag.inplace_view not in operator.tags and not _sized_by_data(node)
    return plain and not set(UNANNOUNCED) & arguments(node).keys()


def _sized_by_data(node: Node) -> bool:
    """Whether an output size of an operator may depend on data, as in indexing with a mask."""
    assert isinstance(node.target, torch._ops.OpOverload)
    if node.target is torch.ops.aten.index.Tensor:
        indices = [leaf.meta.get("val") for leaf in tree_leaves(node.args[1]) if isinstance(leaf, Node)]
        return any(not isinstance(index, torch.Tensor) or index.dtype in (torch.bool, torch.uint8) for index in indices)
    return not DATA_DEPENDENT.isdisjoint(node.target.tags)


DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

UNANNOUNCED = ("running_mean", "running_var", "noise")
"""Arguments that aten operators write to in training mode, although their schemas do not declare it (2.11, 2.13)."""


def keeps_rng_state(node: Node) -> bool:
    """Whether a node is an operator of RNG_STATE."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in RNG_STATE


def written_inputs(signature: ExportGraphSignature) -> tuple[int, ...]:
    """Returns the positions of the inputs that the program writes to, ascending.  `signature`: the one of its functional form."""
    user = list(signature.user_inputs)
    return tuple(sorted({user.index(name) for name in signature.user_inputs_to_mutate.values()}))


def state_buffers(signature: ExportGraphSignature) -> tuple[str, ...]:
    """Returns the names of the buffers that the program writes to, sorted.  `signature`: the one of its functional form."""
    return tuple(sorted(set(signature.buffers_to_mutate.values())))


def size_from_a_float(program: ExportedProgram) -> str:
    """Returns the user's file:line that makes a tensor whose size is computed from a float read out of a tensor, or ""."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else ()
        if any(isinstance(size, torch.SymInt) and FLOATS.search(str(size)) for size in sizes):
            return place(node)[0]
    return ""


def varying_groups(program: ExportedProgram) -> torch.fx.Node | None:
    """Returns a convolution whose number of groups is a size that varies, or None.  Inductor has code only for a constant."""
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        values = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if "weight" in names and isinstance(values.get("groups"), torch.fx.Node):
            return node
    return None


def size_in(program: ExportedProgram, error: Exception) -> str:
    """Returns a message if the operation that torch (2.11, 2.13) names in `error` has a size that depends on data, or ""."""
    name = re.search(r"While executing %(\w+) ", str(error))
    node = next((node for node in program.graph.nodes if name is not None and node.name == name[1]), None)
    if node is None:
        return ""
    values = [node.meta.get("val"), *[operand.meta.get("val") for operand in node.all_input_nodes]]
    sizes = [size for value in tree_leaves(values) for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
    selected = any(isinstance(size, torch.SymInt) and free_unbacked_symbols(size) for size in sizes)
    where, _ = place(node)
    return f"{where}: the size of a tensor depends on data{called_from(node)}" if selected and where else ""


FLOATS = re.compile(r"\bzuf\d")
"""Matches torch's names for symbols of floats that were read out of tensors (2.11, 2.13)."""


@contextmanager
def _other_operators_left_alone(parts: Sequence[GraphModule]) -> Iterator[None]:
    """Makes `run_decompositions` preserve only the composite operators in these graphs while the context is active.

    By default it prepares and restores all of torch's five hundred composite operators, which takes a fifth of a second for every
    program (measured with 2.13).  The set of written tensors does not depend on which operators are preserved.
    """
    name = "_split_decomp_table_to_cia_and_python_decomp"
    split: Any = getattr(exported_program, name, None)
    keep: Any = getattr(exported_program, "_special_op_to_preserve_cia", None)
    preservable: Any = getattr(exported_program, "_is_preservable_cia_op", None)
    if split is None or keep is None or preservable is None:
        yield
        return
    operators = {node.target for part in parts for node in part.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    preserved = {operator: keep for operator in operators if preservable(operator)}
    setattr(exported_program, name, lambda table: (preserved, table))
    try:
        yield
    finally:
        setattr(exported_program, name, split)


def _written_constant(program: ExportedProgram) -> str:
    """Returns the user's file:line where the program writes to a tensor that is neither a parameter, buffer nor input, or ""."""
    constants = set(program.graph_signature.inputs_to_lifted_tensor_constants)
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            written = [operand for name, operand in arguments(node).items() if _writes(node.target, name)]
            if any(isinstance(operand, Node) and operand.name in constants for operand in written):
                return place(node)[0] or "model"
    return ""


def _writes(operator: torch._ops.OpOverload, name: str) -> bool:
    return any(
        argument.name == name and argument.alias_info is not None and argument.alias_info.is_write
        for argument in operator._schema.arguments
    )


def _shared_buffers(program: ExportedProgram) -> tuple[str, str] | None:
    """Returns the user's names of two buffers that share memory, or None."""
    tensors = weight_tensors(program)
    owners: dict[int, str] = {}
    for name in program.graph_signature.inputs_to_buffers.values():
        storage = tensors[name].untyped_storage().data_ptr()
        if tensors[name].numel() and storage in owners:
            return owners[storage].removeprefix(PREFIX), name.removeprefix(PREFIX)
        owners[storage] = name
    return None
