"""Parameters, buffers and constants of an exported program."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind


def weight_tensors(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """Returns the weights by their names in the program.  Constants are non-persistent buffers and literals in forward()."""
    named = {**program.state_dict, **program.constants}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


WEIGHT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def weight_placeholders(program: ExportedProgram) -> dict[str, str]:
    """Returns name of a placeholder -> name of its parameter, buffer or constant in the program."""
    return {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.kind in WEIGHT_KINDS}


SHAPE_ALONE = frozenset({
    "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like", "aten::new_zeros", "aten::new_ones",
    "aten::new_full", "aten::new_empty", "aten::sym_size.int", "aten::_assert_tensor_metadata",
})  # fmt: skip
"""Operators that read only the shape and dtype of their first argument, not its values."""


def reaches_a_result(program: ExportedProgram, name: str) -> bool:
    """Whether an output, an assertion, or a write to another tensor may depend on the contents of the buffer `name`."""
    names = {target: placeholder for placeholder, target in weight_placeholders(program).items()}
    waiting = [node for node in program.graph.nodes if node.name == names.get(name)]
    aliases, seen = set(waiting), set(waiting)
    while waiting:
        for user in waiting.pop().users:
            if isinstance(user.target, torch._ops.OpOverload) and user.target.name() in SHAPE_ALONE:
                continue
            if user.op == "output" or not isinstance(user.target, torch._ops.OpOverload) or "assert" in user.target.name():
                return True
            if user.target._schema.is_mutable:
                if user.args[0] not in aliases:
                    return True
                aliases.add(user)
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
