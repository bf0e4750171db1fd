"""Which inputs of an exported program are weights."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def weight_names(program: ExportedProgram) -> frozenset[str]:
    """The names of the placeholders of parameters, buffers and constants."""
    return frozenset([spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in _KINDS])
