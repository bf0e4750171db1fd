"""Which weights an update of the loaded program must leave as they are: what the code holds of them would stay behind."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from hashlib import sha256
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from cgbundle.format import archive, safetensors
from cgbundle.format.schema import FixedWeight, Weight
from cgbundle.validate.state import CONSTANT, FOLDED, STATE

from ..export.programs import Programs
from ..export.weights import weight_placeholders
from ..model.flat_module import PREFIX


def fixed_weights(stage: Path, rows: Iterable[Weight], programs: Programs, folded: Collection[str]) -> tuple[FixedWeight, ...]:
    """The rows of the manifest, whose weights.safetensors is in `stage`.  `folded`: names in the programs of weights from which
    something was computed that compiled code holds.  Of weights that are tied, all are fixed or none."""
    rows = list(rows)
    named = {name for _, program in programs.each for name in program.state_dict}
    plain_named, plain_folded = [{name.removeprefix(PREFIX) for name in names} for names in (named, folded)]
    updatable = {row.tensor for row in rows if row.name in plain_named}
    held = {row.tensor for row in rows if row.name in plain_folded}
    found = []
    mapped = safetensors.Mapped(str(stage / archive.WEIGHTS), archive.WEIGHTS)
    for index, row in enumerate(rows):
        reason = STATE if row.memory == STATE else CONSTANT if row.tensor not in updatable else FOLDED if row.tensor in held else ""
        if reason:
            digest = sha256(mapped.data(row.tensor)).hexdigest()
            found.append(FixedWeight(weight=index, reason=reason, sha256=digest))
    mapped.close()
    return tuple(found)


def unbound(program: ExportedProgram, bound: Collection[str]) -> set[str]:
    """The weights, by their names in the program, that its results depend on and whose memory compiled code does not read: it holds
    what they were.  `bound`: names of those that it reads."""
    tensors = {name: _place(value) for name, value in {**program.state_dict, **program.constants}.items() if _is_tensor(value)}
    read = {tensors[name] for name in bound}
    return {name for name in used_weights(program) if tensors[name] not in read}


def used_weights(program: ExportedProgram) -> set[str]:
    """The weights, by their names in the program, that a result or something written depends on."""
    names = weight_placeholders(program)
    waiting = [node for node in program.graph.nodes if node.op == "output" or _writes(node)]
    seen = set(waiting)
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each not in seen:
                seen.add(each)
                waiting.append(each)
    return {names[node.name] for node in seen if node.name in names}


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _place(value: torch.Tensor) -> tuple[object, ...]:
    """Equal for tensors that are tied."""
    return (value.data_ptr(), value.dtype, tuple(value.shape), value.stride()) if value.numel() else (id(value),)
