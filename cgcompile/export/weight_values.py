"""What an export says of parameters and buffers: their layout, values that Python read, and those that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ..errors import ModelError
from ..model.flat_module import PREFIX
from ..model.pytree import DENSE, SPARSE, not_dense
from ..model.side_effects import Obstacle, SideEffects
from ..model.source import Source
from ..model.tracing.held_tensors import make_attribute
from ..model.user_code import plain_errors
from .exported import memory_order
from .programs import Programs
from .weights import reaches_a_result


def make_dense(source: Source) -> None:
    """Weights with gaps or overlaps (an expanded buffer, a slice) become row-major copies: a bundle stores dense tensors only.

    A sparse buffer becomes a plain attribute: a model may hold one that no call reads.  Raises dtype-unsupported for a parameter
    that is sparse, and for any weight that is nested or quantized."""
    for name, buffer in list(source.model.named_buffers()):
        if not_dense(buffer) == SPARSE:
            make_attribute(source.model, name, buffer)
    for name, weight in [*source.model.named_parameters(), *source.model.named_buffers()]:
        _refuse_shell(source, name, weight)
        if kind := not_dense(weight):
            text = f"{source.label}: weight {name!r} is {kind}: a bundle holds dense tensors"
            raise ModelError("dtype-unsupported", text, f"make it dense: {DENSE[kind]}")
    for module in source.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.permute(memory_order(buffer)).is_contiguous():
                module._buffers[name] = buffer.contiguous()
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.permute(memory_order(parameter)).is_contiguous():
                parameter.data = parameter.data.contiguous()


def _refuse_shell(source: Source, name: str, weight: torch.Tensor) -> None:
    """Raises dtype-unsupported for a weight whose class keeps its elements somewhere else."""
    try:
        with plain_errors():
            memory_order(weight)
    except Exception as error:
        text = f"{source.label}: weight {name!r} is a {type(weight).__name__}, which does not say how its elements lie in memory"
        fix = "register the tensor inside of it as a parameter, and make the object in forward()"
        raise ModelError("dtype-unsupported", text, fix) from error


def baked_weights(programs: Programs, baked: Mapping[str, tuple[str, str]]) -> Iterator[Obstacle]:
    """A note for every line that read weights of the state dict: others are constants of a bundle anyway."""
    updated = {name.removeprefix(PREFIX) for _, program in programs.distinct for name in program.state_dict}
    names = {asked: [name for name in baked if baked[name] == asked and name in updated] for asked in baked.values()}
    for (where, line), read in names.items():
        if read:
            message = f"Python reads the value of {', '.join(map(repr, read))}"
            yield Obstacle(rule="baked-weight", message=message, where=where, source=line)


def baked_values(calls: Sequence[SideEffects]) -> dict[str, tuple[str, str]]:
    """The parameters and buffers whose values Python got in some call, by name, with the line that asked first."""
    return {name: asked for call in reversed(calls) for name, asked in call.baked.items()}


def unread_attributes(programs: Programs, holding: Mapping[str, Sequence[str]]) -> list[str]:
    """The attributes that no result depends on: a call may be padded.  `holding`: the buffers that hold what is in an attribute."""
    unique = [program for _, program in programs.distinct]
    return [name for name, held in holding.items() if not any(reaches_a_result(one, PREFIX + it) for one in unique for it in held)]
