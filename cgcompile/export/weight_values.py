"""Makes the parameters and buffers of an export dense.  Finds weights whose values Python read, and attributes that no result
uses."""

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
    """Replaces weights with gaps or overlaps (an expanded buffer, a slice) by row-major copies: a bundle stores only dense tensors.

    A sparse buffer becomes a plain attribute, because a model may hold one that its calls do not read.  Raises dtype-unsupported
    for a sparse parameter, and for nested or quantized weights."""
    for name, buffer in list(source.model.named_buffers()):
        if not_dense(buffer) == SPARSE:
            make_attribute(source.model, name, buffer)
    for name, weight in [*source.model.named_parameters(), *source.model.named_buffers()]:
        _refuse_without_strides(source, name, weight)
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


def _refuse_without_strides(source: Source, name: str, weight: torch.Tensor) -> None:
    """Raises dtype-unsupported for a tensor subclass that only wraps another tensor and has no strides."""
    try:
        with plain_errors():
            memory_order(weight)
    except Exception as error:
        text = f"{source.label}: weight {name!r} is a {type(weight).__name__}, which has no strides"
        fix = "register its inner tensor as a parameter, and construct the subclass in forward()"
        raise ModelError("dtype-unsupported", text, fix) from error


def baked_weights(programs: Programs, baked: Mapping[str, tuple[str, str]]) -> Iterator[Obstacle]:
    """Yields an obstacle for every source line that read values of weights.  Weights that are not in the state dict need none,
    because no update can change them."""
    state_names = {name.removeprefix(PREFIX) for _, program in programs.distinct for name in program.state_dict}
    names = {place: [name for name in baked if baked[name] == place and name in state_names] for place in baked.values()}
    for (where, line), read in names.items():
        if read:
            message = f"Python reads the value of {', '.join(map(repr, read))}"
            yield Obstacle(rule="baked-weight", message=message, where=where, source=line)


def baked_values(calls: Sequence[SideEffects]) -> dict[str, tuple[str, str]]:
    """Returns the parameters and buffers whose values Python read in some call, by name, with the first line that read them."""
    return {name: place for call in reversed(calls) for name, place in call.baked.items()}


def unread_attributes(programs: Programs, holding: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns the attributes that no result depends on.  They need not become state, which would prevent padding.  `holding`: the
    buffers of each attribute."""
    distinct = [program for _, program in programs.distinct]
    return [
        name
        for name, buffers in holding.items()
        if not any(reaches_a_result(program, PREFIX + buffer) for program in distinct for buffer in buffers)
    ]
