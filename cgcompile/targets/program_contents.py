"""Hashes the contents of an exported program.  Programs with equal hashes compile to the same code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch.export import ExportedProgram

from ..export.weights import weight_tensors
from ..util.content_cache import digest
from .weights import contents_sha256


def program_contents(programs: Iterable[ExportedProgram]) -> dict[int, str]:
    """Returns the hash of each program's code, signature and tensors, by `id` of the program.  Declared ranges of sizes do not
    affect it.  A weight that several programs share is read once."""
    hashes: dict[object, bytes] = {}
    digests: dict[int, str] = {}
    for program in programs:
        if id(program) not in digests:
            digests[id(program)] = digest(*_described(program, hashes))
    return digests


def tensor_layout(tensor: torch.Tensor) -> tuple[object, ...]:
    """Returns dtype, shape and strides in elements."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def program_code(program: ExportedProgram) -> Iterator[object]:
    """Yields the code and the signature of a program."""
    for name, module in program.graph_module.named_modules():
        if isinstance(module, torch.fx.GraphModule):
            yield name, module.code
    yield str(program.graph_signature), str(program.call_spec)


def _described(program: ExportedProgram, hashes: dict[object, bytes]) -> Iterator[object]:
    yield from program_code(program)
    for name, value in weight_tensors(program).items():
        identity = value.data_ptr(), *tensor_layout(value)
        if identity not in hashes:
            hashes[identity] = contents_sha256(value)
        yield name, tensor_layout(value), hashes[identity]
