"""The arguments of a program, fake cuda tensors for them, and which of them the program writes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from ...errors import BuildError, ModelError
from ...export.exported import memory_order
from ..lowered import INPUT, WEIGHT

DEVICE = torch.device("cuda", 0)

KINDS = {
    InputKind.PARAMETER: WEIGHT,
    InputKind.BUFFER: WEIGHT,
    InputKind.CONSTANT_TENSOR: WEIGHT,
    InputKind.USER_INPUT: INPUT,
}

Row = tuple[str, str, torch.Tensor | None]
"""(kind, name, tensor) of an argument; the tensor is None for an argument that is None or a number."""


def argument_rows(program: ExportedProgram, tensors: Sequence[torch.Tensor]) -> list[Row]:
    rows: list[Row] = []
    state: dict[str, Any] = {**program.state_dict, **program.constants}
    count = 0
    for spec, node in zip(
        program.graph_signature.input_specs, [n for n in program.graph.nodes if n.op == "placeholder"], strict=True
    ):
        if isinstance(spec.arg, ConstantArgument):
            rows.append((INPUT, "", None))
            continue
        if spec.kind not in KINDS:
            raise ModelError("constant-unknown", f"input {spec.arg.name} of the program is of the kind {spec.kind.name}")
        if spec.kind == InputKind.USER_INPUT:
            if count >= len(tensors):
                raise BuildError("inputs-unlike", f"the program takes more than the {len(tensors)} tensors of the call")
            tensor, fake = tensors[count], node.meta["val"]
            if (tensor.dtype, tensor.dim()) != (fake.dtype, fake.dim()):
                raise BuildError("inputs-unlike", f"input {count} is {_text(tensor)}, the program takes {_text(fake)}")
            rows.append((INPUT, str(count), tensor))
            count += 1
        else:
            rows.append((WEIGHT, spec.target, state[spec.target]))
    if count != len(tensors):
        raise BuildError("inputs-unlike", f"the program takes {count} tensors, the call has {len(tensors)}")
    return rows


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def fake_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a cuda tensor of the same sizes.  Inputs and weights are stored dense, with the axes in their memory order."""
    return torch.empty_permuted(tuple(tensor.shape), memory_order(tensor), dtype=tensor.dtype, device=DEVICE)


def changed_outputs(program: ExportedProgram) -> list[tuple[int, int]]:
    """Returns (output's position, argument's position) for outputs of a functional program that are new values of arguments."""
    specs = program.graph_signature.input_specs
    buffers = {spec.target: place for place, spec in enumerate(specs) if spec.kind == InputKind.BUFFER}
    names = {spec.arg.name: place for place, spec in enumerate(specs)}
    mutations = []
    for position, spec in enumerate(program.graph_signature.output_specs):
        if spec.kind == OutputKind.USER_INPUT_MUTATION:
            mutations.append((position, names[str(spec.target)]))
        elif spec.kind == OutputKind.BUFFER_MUTATION:
            mutations.append((position, buffers[spec.target]))
        elif spec.kind != OutputKind.USER_OUTPUT:
            raise ModelError("operator-without-kernel", f"output {position} of the program is of the kind {spec.kind.name}")
    return mutations


def check_apart(written: Sequence[Row], rows: Sequence[Row]) -> None:
    """Raises state-shared if a weight that is written to shares memory with another weight, because a bundle stores them apart."""
    for kind, name, tensor in written:
        for other_kind, other, value in rows:
            two_weights = kind == other_kind == WEIGHT and other != name and tensor is not None and value is not None
            if two_weights and _share(value, tensor):
                raise ModelError("state-shared", f"{name}, which the program changes, lies in the same memory as {other}")


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
