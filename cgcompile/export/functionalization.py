"""The functional form of a program, which names the buffers and inputs that the program writes to.

Private interfaces of torch.export.exported_program (2.11, 2.13): `_split_decomp_table_to_cia_and_python_decomp`, which is replaced
meanwhile, `_special_op_to_preserve_cia`, `_is_preservable_cia_op`.  Without one of them the form is made all the same, only later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export import ExportedProgram, ExportGraphSignature, exported_program
from torch.fx import GraphModule, Node

from ..errors import ModelError
from ..model.flat_module import PREFIX
from ..model.tracing.attributes import ATTRIBUTE_FIX
from ..model.user_code import first_line, place
from .torch_program import arguments, without_weights
from .weights import weight_tensors

RNG_STATE = frozenset({"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"})
"""Higher-order operators that save and restore the state of a random generator."""


def functional(program: ExportedProgram) -> ExportGraphSignature:
    """The signature of the functional form: export itself leaves writes in place as operations of the graph.  That of a program
    without any is its own: making the form traces the program anew, which takes as long as exporting it.

    torch makes none of a program that saves states of random generators: it is the program's own then, and the rule
    rng-state-operation refuses the program.  Raises state-changed, state-shared, shape-depends-on-data, export-failed.
    """
    parts = [module for module in program.graph_module.modules() if isinstance(module, GraphModule)]
    if any(keeps_rng_state(node) for part in parts for node in part.graph.nodes):
        return program.graph_signature
    if all(_only_reads(node) for part in parts for node in part.graph.nodes):
        return program.graph_signature
    if any(node.target is torch.ops.aten.lstm.input for part in parts for node in part.graph.nodes):
        # on CUDA, torch before 2.13 writes it with states that have an extra axis (pytorch issue 151200)
        program = without_weights(program)
    try:
        with _other_operators_left_alone(parts):
            return program.run_decompositions({}).graph_signature
    except Exception as error:
        if where := _written_constant(program) or ("model" if "register it as buffer" in str(error) else ""):  # torch's words
            raise ModelError(
                "state-changed",
                f"{where}: forward() writes to a tensor that is an attribute of something and no buffer",
                f"{ATTRIBUTE_FIX}; let inputs() give a cache of transformers as an argument",
            ) from error
        if shared := _shared_buffers(program):
            raise ModelError(
                "state-shared",
                f"model: the buffers {shared[0]!r} and {shared[1]!r} share memory, and torch.export cannot follow writes to them",
                "give each a tensor of its own",
            ) from error
        if where := size_from_a_float(program):
            raise ModelError("shape-depends-on-data", f"{where}: the size of a tensor depends on data") from error
        raise ModelError(
            "export-failed",
            f"model: torch.export cannot make the program functional: {type(error).__name__}: {first_line(error)}",
            "leave torch.no_grad and torch.set_grad_enabled out of forward(): a bundle computes no gradients",
        ) from error


def _only_reads(node: Node) -> bool:
    """Whether a node surely writes to nothing, and makes no size from data, which may not be possible to trace.  Operators of
    others, and those that call a graph, may do anything."""
    if node.op != "call_function":
        return node.op in ("placeholder", "get_attr", "output")
    operator = node.target
    if not isinstance(operator, torch._ops.OpOverload):
        return getattr(operator, "__module__", "") in ("_operator", "math")
    if operator.namespace not in ("aten", "prims") or operator._schema.is_mutable or not DATA_DEPENDENT.isdisjoint(operator.tags):
        return False
    given = arguments(node)
    return not any(name in given for name in UNANNOUNCED) or given.get("training", given.get("use_input_stats")) is False


DATA_DEPENDENT = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

UNANNOUNCED = ("running_mean", "running_var", "noise")
"""Arguments that operators of aten write to though their schemas do not say so (2.11, 2.13), unless they are told not to train."""


def keeps_rng_state(node: Node) -> bool:
    """Whether a node is an operator of RNG_STATE."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in RNG_STATE


def written_inputs(signature: ExportGraphSignature) -> tuple[int, ...]:
    """The positions of the inputs that the program writes to, ascending; `signature` is that of its functional form."""
    user = list(signature.user_inputs)
    return tuple(sorted({user.index(name) for name in signature.user_inputs_to_mutate.values()}))


def state_buffers(signature: ExportGraphSignature) -> tuple[str, ...]:
    """The names of the buffers that the program writes to, sorted; `signature` is that of its functional form."""
    return tuple(sorted(set(signature.buffers_to_mutate.values())))


def size_from_a_float(program: ExportedProgram) -> str:
    """Where a tensor is made whose size follows from a float that was read out of another, or ""."""
    for node in program.graph.nodes:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else ()
        if any(isinstance(size, torch.SymInt) and FLOATS.search(str(size)) for size in sizes):
            return place(node)[0]
    return ""


FLOATS = re.compile(r"\bzuf\d")
"""How torch calls the symbols of such floats (2.11, 2.13)."""


@contextmanager
def _other_operators_left_alone(parts: Sequence[GraphModule]) -> Iterator[None]:
    """Meanwhile `run_decompositions` keeps composite operators whole that stand in these graphs, and no others.

    It prepares each of torch's five hundred composite operators for the trace and undoes that afterwards, a fifth of a second for
    every program (measured with 2.13).  What is written to is the same whether an operator inside another stays whole.
    """
    name = "_split_decomp_table_to_cia_and_python_decomp"
    split: Any = getattr(exported_program, name, None)
    keep: Any = getattr(exported_program, "_special_op_to_preserve_cia", None)
    preservable: Any = getattr(exported_program, "_is_preservable_cia_op", None)
    if split is None or keep is None or preservable is None:
        yield
        return
    found = {node.target for part in parts for node in part.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    kept = {operator: keep for operator in found if preservable(operator)}
    setattr(exported_program, name, lambda table: (kept, table))
    try:
        yield
    finally:
        setattr(exported_program, name, split)


def _written_constant(program: ExportedProgram) -> str:
    """The user's file:line where the program writes to a tensor that is neither a parameter, a buffer nor an input, or ""."""
    constants = set(program.graph_signature.inputs_to_lifted_tensor_constants)
    for node in program.graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            written = [given for name, given in arguments(node).items() if _writes(node.target, name)]
            if any(isinstance(given, Node) and given.name in constants for given in written):
                return place(node)[0] or "model"
    return ""


def _writes(operator: torch._ops.OpOverload, name: str) -> bool:
    return any(
        each.name == name and each.alias_info is not None and each.alias_info.is_write for each in operator._schema.arguments
    )


def _shared_buffers(program: ExportedProgram) -> tuple[str, str] | None:
    """Two buffers that share memory, by the user's names."""
    tensors = weight_tensors(program)
    owners: dict[int, str] = {}
    for name in program.graph_signature.inputs_to_buffers.values():
        storage = tensors[name].untyped_storage().data_ptr()
        if tensors[name].numel() and storage in owners:
            return owners[storage].removeprefix(PREFIX), name.removeprefix(PREFIX)
        owners[storage] = name
    return None
